"""The largest moments of a step on a mesh: measured by the allocator, and as the plan foretells them.

mpirun -n 4 python tests/jobs/mesh_peaks.py dp pp tp
"""

import json
import sys
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import memory, nn, plan

GPT: dict[str, Any] = {"vocab": 50, "context": 16, "width": 64, "heads": 4, "layers": 4, "tied": False}
K, BATCH = 3, 4

mesh = mz.Mesh(mz.Communicator(), *map(int, sys.argv[1:]))
dp, pp, tp = mesh.sizes
tokens = np.random.default_rng(mesh.dp.rank).integers(0, 50, (K, BATCH, 16))
batch = [(micro, micro) for micro in tokens]
found = []
for name, stage in (("DP", mz.DataParallel), ("ZeRO-3", mz.Zero3)):
    model = nn.GPT(**GPT, dtype="bfloat16", split=mz.Split(mesh.tp))
    engine = stage(mz.Stage(model, mesh.pp), mz.Adam(), mesh.dp)
    pipeline = mz.Pipeline(engine, mesh.pp, F.cross_entropy)
    pipeline.backward(batch)
    engine.step()
    with memory.measure(engine) as seen:
        pipeline.backward(batch)
        engine.step()
    sizes = plan.gpt(**GPT, batch=BATCH, tp=tp).stage(mesh.pp.rank, pp, K)
    predicted = plan.peaks(sizes, plan.Recipe(), name, dp)
    for phase in ("forward", "backward", "step"):
        found.append([name, mesh.pp.rank, phase, seen.peaks[phase], predicted[phase]])
    del engine, pipeline, model
everywhere = mesh.comm.mpi.gather(found)
if everywhere:
    print(json.dumps([each for rank in everywhere for each in rank]))
