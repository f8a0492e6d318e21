"""A budget that all ranks cross alike: each raises, and training goes on. With `some`, rank 1 alone crosses it."""

import sys

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import memory, nn
from minizero.backend import xp

comm = mz.Communicator()
rng = np.random.default_rng(comm.rank)
WIDTH, LAYERS = 128, 8
ROWS = 192  # so that activations show
x, y = xp.asarray(rng.random((ROWS, WIDTH), np.float32)), rng.integers(0, WIDTH, ROWS)


def make(stage: type[mz.Engine], dtype: str = "bfloat16") -> mz.Engine:
    return stage(nn.MLP([WIDTH] * (LAYERS + 1), dtype=dtype), mz.Adam(1e-2), comm)


def train(engine: mz.Engine, rows: int = ROWS) -> None:
    engine.backward(F.cross_entropy(engine(x[:rows]), y[:rows]))
    engine.step()


def bits(engine: mz.Engine) -> list[bytes]:
    arrays = [a for unit in engine.units for a in (unit.weights, *(unit.state or {}).values())]
    return [array.tobytes() for array in arrays]


if "some" in sys.argv:
    engine = make(mz.DataParallel)
    with memory.budget("1 kB" if comm.rank == 1 else "1 GB"):
        train(engine)
    sys.exit("a budget that only rank 1 had did not end the job")

train(make(mz.DataParallel))  # scratch that all engines share is made once
caught = []
for stage in mz.STAGES:
    tried: mz.Engine | None = None
    before: list[mz.Engine] = []
    with memory.measure() as seen:
        undisturbed = make(stage)
        train(undisturbed)
    peaks = {phase: sum(terms.values()) for phase, terms in seen.peaks.items()}
    train(undisturbed)
    wanted = bits(undisturbed)
    del undisturbed
    for phase in ("building", "forward", "backward", "step"):
        tried = None if phase == "building" else make(stage)
        before = [tried] if tried else []
        limit = peaks[phase] - 4 * memory.SMALL  # a little less than the largest moment of this phase needs
        earlier = ("forward", "backward")[: ("building", "forward", "backward", "step").index(phase) - 1]
        if phase != "building" and any(peaks[each] >= peaks[phase] for each in earlier):
            continue  # an earlier phase would fail first
        try:
            with memory.budget(limit, *before):
                tried = tried or make(stage)
                train(tried)
        except memory.OutOfMemory as error:
            where = f"{stage.__name__}, limit {limit}"
            assert error.phase == phase, f"{where}: {error.phase} instead of {phase}: {error}"
            assert error.limit == limit and error.stage == stage.__name__ and error.ranks == comm.size, vars(error)
            assert sum(error.held.values()) <= limit < sum(error.held.values()) + error.asked, vars(error)
            assert error.unit.startswith("layers.") or phase in ("forward", "step"), f"{where}: unit {error.unit!r}"
            assert error.steps == 0 and error.sizes is not None and error.recipe is not None
            assert str(limit) in str(error).replace(",", "") and phase in str(error), error
            caught.append(f"{stage.__name__} {phase}")
        else:
            raise AssertionError(f"{stage.__name__}: {phase} with {limit} bytes passed, where the peak is {peaks}")
        if tried is not None:
            assert tried.steps == 0
            tried.zero_grad()
            with memory.budget(max(peaks.values()) + 1, tried):  # not a byte stayed behind
                train(tried)
            train(tried)
            assert bits(tried) == wanted, f"{stage.__name__} after an out-of-memory in {phase}: other bits"
if comm.rank == 0:
    print(caught)
