"""Do N ranks learn what one process learns from the undivided batch, up to rounding? In every stage.

    mpirun -n 5 python tests/jobs/proof_undivided.py

The yardstick is the distance that a tensor has come since the start, so that a wrong scale (a forgotten mean) is as
large as it is wrong. Rank 0 prints the largest error in each dtype, as JSON; one that is too large raises.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))
import minizero as mz
from models import PROBLEMS, joined
from oracle import Oracle

STEPS = 4
TOLERANCE = {"float64": 1e-12, "float32": 1e-4}  # of the distance moved
CASES: list[tuple[str, str, Callable[[], mz.Optimizer], int, bool, float | None]] = [
    # problem, dtype, optimizer, micro-batches, uneven slices (one of them empty), clipping
    ("mlp", "float64", lambda: mz.SGD(lr=0.5), 1, False, None),
    ("mlp", "float64", lambda: mz.Adam(lr=0.02, weight_decay=0.1), 3, True, None),
    ("gpt tied", "float64", lambda: mz.SGD(lr=0.5, momentum=0.9), 3, False, None),
    ("gpt untied", "float64", lambda: mz.SGD(lr=0.5), 1, True, 0.1),
    ("shared", "float64", lambda: mz.Adam(lr=0.02), 1, True, 0.1),
    ("frozen", "float64", lambda: mz.SGD(lr=0.5), 3, True, None),
    ("odd shapes", "float64", lambda: mz.SGD(lr=0.5, momentum=0.9), 3, True, 0.1),
    ("mlp", "float32", lambda: mz.SGD(lr=0.5), 3, True, None),
    ("gpt tied", "float32", lambda: mz.SGD(lr=0.5, momentum=0.9), 1, False, None),
]

comm = mz.Communicator()
worst = {dtype: 0.0 for dtype in TOLERANCE}
compared = 0
for number, (name, dtype, optimizer, micros, uneven, clip) in enumerate(CASES):
    problem = PROBLEMS[name]
    counts = [[(3 * r + 2 * m) % 5 if uneven else 4 for m in range(micros)] for r in range(comm.size)]

    def batch_of(step: int, rank: int, micro: int) -> Any:
        generator = np.random.default_rng([number, step, rank, micro])  # noqa: B023
        return problem.draw(generator, counts[rank][micro], dtype)  # noqa: B023

    whole = Oracle(problem.build(0, dtype), optimizer(), 1)
    start = dict(whole.weights)
    for step in range(STEPS):
        slices = [batch_of(step, rank, micro) for rank in range(comm.size) for micro in range(micros)]
        norm = whole.step(problem.loss, [[joined(slices)]], clip=clip)
        assert clip is None or (norm is not None and norm > clip), f"{name}: a norm of {norm} is not clipped"
    for stage in mz.STAGES:
        engine: Any = stage(problem.build(comm.rank, dtype), optimizer(), comm)
        for step in range(STEPS):
            for micro in range(micros):
                loss = problem.loss(engine, batch_of(step, comm.rank, micro))
                engine.backward(loss, examples=counts[comm.rank][micro] if uneven else None)
            if clip is not None:
                engine.clip_grad_norm(clip)
            engine.step()
        for path, x in engine.gather_parameters().items():
            if not x.size or not whole.parameters[path].requires_grad:
                continue
            moved = float(abs(whole.weights[path] - start[path]).max())
            wrong = float(abs(x - whole.weights[path]).max())
            assert x.dtype == dtype
            assert (moved < 1e-6) == path.endswith("key.bias"), f"{name}: {path} moved by only {moved}"
            if moved < 1e-6:  # its true gradient is zero: compare with what others move by
                moved = 1.0
            compared += 1
            worst[dtype] = max(worst[dtype], wrong / moved)
            where = f"{name} {dtype}, {stage.__name__}, rank {comm.rank}, {path}"
            assert wrong < TOLERANCE[dtype] * moved, f"{where}: wrong by {wrong:.3g}, and moved by {moved:.3g}"

worst = {dtype: comm.mpi.allreduce(error, MPI.MAX) for dtype, error in worst.items()}
if comm.rank == 0:
    print(json.dumps({"compared": compared, **worst}))
