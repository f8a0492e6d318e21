"""How much more than before does a rank hold while it saves, and while it loads? Nothing is gathered: not one unit.

mpirun -n 4 python tests/jobs/checkpoint_memory.py DIRECTORY
"""

import sys
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import memory, nn, optim

WIDTH = 512
comm = mz.Communicator()
unit = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer
tops: dict[str, Any] = {}
for stage in mz.STAGES:
    where = f"{sys.argv[1]}/{stage.__name__}"

    def train(engine: mz.Engine) -> None:
        engine.backward(F.cross_entropy(engine(np.ones((2, WIDTH), "float32")), np.array([0, 1])))
        engine.step()

    engine = stage(nn.MLP([WIDTH] * 5), mz.Adam(), comm)
    train(engine)
    for what, action in (("save", lambda: engine.save(where)), ("load", lambda: engine.load(where))):  # noqa: B023
        action()
        with memory.measure(engine) as seen:
            before = seen.live()
            action()
        top = max((sum(terms.values()) for terms in seen.peaks.values()), default=before) - before
        assert top < unit // comm.size // 4, f"{stage.__name__}: to {what} took {top} bytes more; a unit has {unit}"
        tops[f"{stage.__name__} {what}"] = top
    fresh = stage(nn.MLP([WIDTH] * 5), mz.Adam(), comm)
    with memory.measure(fresh) as seen:
        before = seen.live()
        fresh.load(where)
        after = seen.live()
    top, held = max(sum(terms.values()) for terms in seen.peaks.values()) - before, engine.memory()["optimizer"]
    assert after - before >= held and fresh.memory() == engine.memory()
    held += 4 * optim.block_size(max(unit.length for unit in fresh.units))  # Adam's scratch, made once
    assert top < held + unit // comm.size // 4, f"{stage.__name__}: loading takes {top}, moments and scratch are {held}"
if comm.rank == 0:
    print(tops)
