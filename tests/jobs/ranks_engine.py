"""Ranks that train differently: another model, a skipped layer, another call. An error on all, or right numbers."""

import sys
import time
from collections.abc import Callable
from typing import Any

import expect
import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn

world = mz.Communicator()
N, rank = world.size, world.rank
x = np.random.default_rng(rank).standard_normal((3, 6)).astype("float32")
y = np.arange(3)


def raises(kind: type[Exception], what: str, call: Callable[[], Any], *words: str) -> None:
    start = time.monotonic()
    expect.raises(kind, call, *words, what=f"{what}, rank {rank} of {N}")
    assert time.monotonic() - start < 8, f"{what}: {time.monotonic() - start:.1f} s until the error on rank {rank}"


class Skipping(nn.Module):
    """in -> hidden -> hidden -> hidden -> out; `skip` leaves out the second layer, which has the size of the third."""

    def __init__(self, width: int = 8) -> None:
        self.seed, self.skip, self.multiply_by_zero = 5, False, False
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, width)
        self.third, self.last = nn.Linear(width, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> mz.Tensor:
        x = F.relu(self.first(x))
        if self.multiply_by_zero:
            x = x + self.second(x) * 0  # the layer takes part, with a gradient of zeros
        elif not self.skip:
            x = F.relu(self.second(x))
        return self.last(F.relu(self.third(x)))


def train(stage: type[mz.Engine], how: str, width: int = 8) -> dict[str, Any]:
    """Two steps in which rank 0 skips the second layer; the weights afterwards."""
    model = Skipping(width)
    engine = stage(model, mz.SGD(0.1, momentum=0.9), world.split(0))
    for _ in range(2):
        setattr(model, how, rank == 0)
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    return engine.gather_parameters()


# A layer that rank 0 skips: its gradient counts as zeros there; under ZeRO-3 nobody may go on with wrong weights.
wanted = train(mz.DataParallel, "multiply_by_zero")
for stage in (mz.DataParallel, mz.Zero1, mz.Zero2):
    got = train(stage, "skip")
    for name, value in wanted.items():
        same = np.array_equal(got[name].view(np.uint32), value.view(np.uint32))
        assert same, f"{stage.__name__}, rank {rank}: {name} is not as with a gradient of zeros"
skipped = "all_gather of second", "all_gather of third", "every rank must call the same collectives"
raises(mz.CollectiveError, "ZeRO-3, rank 0 skips", lambda: train(mz.Zero3, "skip"), *skipped)

# Models that are not the same on all ranks.
variants: dict[str, Callable[[bool], nn.Module]] = {
    "width": lambda odd: nn.MLP([6, 9 if odd else 8, 3]),
    "transposed": lambda odd: nn.MLP([6, 4, 6] if odd else [4, 6, 4]),
    "number of layers": lambda odd: nn.MLP([6, 8, 3] if odd else [6, 8, 8, 3]),
    "dtype": lambda odd: nn.MLP([6, 8, 3], dtype="float64" if odd else "float32"),
    "bfloat16": lambda odd: nn.MLP([6, 8, 3], dtype="bfloat16" if odd else "float32"),
    "untied": lambda odd: nn.GPT(vocab=7, context=4, width=4, heads=2, layers=1, tied=not odd),
    "frozen": lambda odd: frozen(nn.MLP([6, 8, 3]), odd),
    "names": lambda odd: nn.MLP([6, 8, 3]) if odd else nn.Sequential(nn.Linear(6, 8), F.relu, nn.Linear(8, 3)),
}


def frozen(model: nn.Module, odd: bool) -> nn.Module:
    model.parameters()[0].requires_grad = not odd
    return model


odd_rank = N - 1
for title, make in variants.items():
    for stage in (mz.Zero1, mz.Zero3):
        comm = world.split(0)
        wrap = lambda: stage(make(rank == odd_rank), mz.SGD(0.1), comm)  # noqa: B023, E731
        raises(ValueError, title, wrap, f"ranks [{odd_rank}] wrap another model than rank 0", f"on rank {rank}")
        total = comm.mpi.allreduce(1)
        assert total == N  # the communicator still works
other_stage = mz.Zero1 if rank == 0 else mz.Zero2
everyone_else = f"ranks {list(range(1, N))} wrap another model than rank 0: stage"
raises(
    ValueError, "stage", lambda: other_stage(nn.MLP([6, 3]), mz.SGD(0.1), world), everyone_else, other_stage.__name__
)
other = mz.Adam() if rank == 0 else mz.SGD(0.1)
raises(ValueError, "optimizer", lambda: mz.Zero1(nn.MLP([6, 3]), other, world), everyone_else, type(other).__name__)


# Ranks that are at different points of the loop.
def behind(stage: type[mz.Engine]) -> None:
    engine = stage(nn.MLP([6, 8, 3]), mz.SGD(0.1), world.split(0))
    engine.backward(F.cross_entropy(engine(x), y))
    if rank == 1:
        engine.step()
    else:
        engine.backward(F.cross_entropy(engine(x), y))


raises(mz.CollectiveError, "step or backward", lambda: behind(mz.DataParallel), "all_reduce of layers.1", "control")
raises(mz.CollectiveError, "step or backward", lambda: behind(mz.Zero2), "reduce_scatter of layers.1", "control")
raises(mz.CollectiveError, "step or forward", lambda: behind(mz.Zero3), "all_gather of layers.0", "control")


def caught_alone() -> None:
    """Rank 1 catches an exception in its forward, and goes on to the next batch; the others are still in this one."""
    engine = mz.Zero3(nn.MLP([6, 8, 3]), mz.SGD(0.1), world.split(0))
    bad = np.full(3, 99) if rank == 1 else y
    for targets in (bad, y):
        try:
            engine.backward(F.cross_entropy(engine(x), targets))
        except IndexError:
            assert rank == 1


raises(mz.CollectiveError, "caught by one rank only", caught_alone, "all_gather of layers.0", "of layers.1")
sys.stdout.write(f"rank {rank} of {N}: done\n")
