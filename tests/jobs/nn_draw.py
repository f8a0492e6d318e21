"""Do all ranks, in every stage, start from rank 0's values: drawn, used before, or changed by hand? Whose is the noise?

mpirun -n 3 python tests/jobs/nn_draw.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import to_host, xp

comm = mz.Communicator()
Values = dict[str, np.ndarray[Any, Any]]


def mlp(seed: int, dtype: str) -> nn.Module:
    return nn.MLP([7, 5, 3], seed=seed, dtype=dtype)


def gpt(seed: int, dtype: str) -> nn.Module:
    return nn.GPT(vocab=11, context=6, width=8, heads=2, layers=2, seed=seed, dtype=dtype)


def values(model: nn.Module) -> Values:
    """Without engine."""
    model.materialise()
    return {name: to_host(parameter.data).copy() for name, parameter in model.named_parameters()}


def check(engine: mz.Engine, expected: Values, what: str) -> None:
    found = engine.gather_parameters()
    assert list(found) == list(expected), f"rank {comm.rank}, {what}: {list(found)}"
    for name, array in expected.items():
        unsigned = f"u{array.dtype.itemsize}"
        same = (array.dtype, array.shape) == (found[name].dtype, found[name].shape)
        assert same and (array.view(unsigned) == found[name].view(unsigned)).all(), (
            f"rank {comm.rank}, {type(engine).__name__}, {what}: {name} differs"
        )


for make in (mlp, gpt):
    for dtype in ("float32", "bfloat16", "float64"):
        for stage in mz.STAGES:
            expected = values(make(5, dtype))
            check(stage(make(5, dtype), mz.SGD(0.1), comm), expected, f"{dtype}, drawn")
            check(stage(make(5 + comm.rank, dtype), mz.SGD(0.1), comm), expected, f"{dtype}, seeds that differ")

for stage in mz.STAGES:
    model = mlp(5 + comm.rank, "float32")
    model(np.ones((2, 7), "float32"))  # draws it, on each rank from another seed
    check(stage(model, mz.SGD(0.1), comm), values(mlp(5, "float32")), "used before wrapping")

    model, expected = mlp(5, "float32"), values(mlp(5, "float32"))
    model.materialise()
    changed = model.parameters()[2]
    changed.data[1] = 10 + comm.rank
    expected["layers.1.weight"][1] = 10
    check(stage(model, mz.SGD(0.1), comm), expected, "changed by hand before wrapping")

    model, expected = mlp(5, "float32"), values(mlp(5, "float32"))
    model.parameters()[0].bind(xp.full((5, 7), 1.5 - comm.rank, "float32"))
    expected["layers.0.weight"][:] = 1.5
    check(stage(model, mz.SGD(0.1), comm), expected, "one given, the others to be drawn")


class Masks(nn.Module):
    """Keeps what its two dropouts let through."""

    def __init__(self, seed: int) -> None:
        self.seed, self.layer = seed, nn.Linear(40, 1)
        self.dropouts = [nn.Dropout(0.4), nn.Dropout(0.4)]
        self.masks: list[np.ndarray[Any, Any]] = []

    def forward(self, x: Any) -> mz.Tensor:
        seen = [dropout(x) for dropout in self.dropouts]
        self.masks += [np.array(to_host(xp.asarray(each.data))) for each in seen]
        return self.layer(seen[0] + seen[1])


def expected_mask(*where: int) -> np.ndarray[Any, Any]:
    kept = np.random.default_rng(where).random((3, 40), dtype="float32") >= 0.4
    return kept.astype("float32") / np.float32(0.6)


x = np.ones((3, 40), "float32")
for stage in mz.STAGES:
    model = Masks(9)
    engine = stage(model, mz.SGD(0.1), comm)
    wanted: list[np.ndarray[Any, Any]] = []

    def run(work: Callable[[], Any], *where: tuple[int, int, int]) -> None:
        work()
        wanted.extend(expected_mask(9, comm.rank, *each) for each in where)  # noqa: B023

    for step in range(2):
        with engine.no_sync():
            run(lambda: engine.backward(F.mean(engine(x))), (step, 0, 1), (step, 0, 2))  # noqa: B023
        model.eval()
        with mz.no_grad():
            engine(x)
        assert all((mask == 1).all() for mask in model.masks[-2:]), "dropout in evaluation"
        del model.masks[-2:]
        model.train()
        run(lambda: engine.backward(F.mean(engine(x))), (step, 1, 1), (step, 1, 2))  # noqa: B023
        if step == 0:
            engine.zero_grad()  # as if it had not been
            run(lambda: engine.backward(F.mean(engine(x))), (0, 0, 1), (0, 0, 2))  # noqa: B023
        engine.step()
    assert len(model.masks) == len(wanted) == 10
    for i, (mask, want) in enumerate(zip(model.masks, wanted, strict=True)):
        assert (mask == want).all(), f"rank {comm.rank}, {stage.__name__}: mask {i} is not that of its place"
    distinct = {mask.tobytes() for mask in model.masks}
    assert len(distinct) == 8, f"{len(distinct)} different masks"
    everyone = comm.mpi.allgather(model.masks[0].tobytes())
    assert len(set(everyone)) == comm.size, "ranks have the same noise"

if comm.rank == 0:
    print("rank 0's values everywhere, and everyone's own noise")
