"""Bad numbers, bad calls and exceptions that the user catches: the same error on every rank, and nothing has changed.

Whatever went wrong, the next steps must have the bits of a run in which it never happened.
"""

import sys
from collections.abc import Callable
from typing import Any

import expect
import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.autograd import record

world = mz.Communicator()
N, rank = world.size, world.rank
Snapshot = dict[str, Any]


def batch(step: int) -> tuple[Any, Any]:
    generator = np.random.default_rng([rank, step])
    return generator.standard_normal((4, 6)).astype("float32"), generator.integers(0, 3, 4)


class BoomError(Exception):
    pass


class Layer(nn.Linear):
    """7 -> 7. `spoil` is what a rank does to the result, inside the unit, where that is whole."""

    spoil: Callable[[mz.Tensor], mz.Tensor] | None = None

    def forward(self, x: Any) -> mz.Tensor:
        x = super().forward(x)
        return self.spoil(x) if self.spoil else x


class Model(nn.Module):
    """6 -> 7 -> 7 -> 7 -> 3; the second layer is used twice, and is whole between the two while backward runs."""

    def __init__(self, dtype: str) -> None:
        self.seed = 3
        self.first, self.second, self.last = (
            kind(i, o, dtype=dtype) for kind, i, o in ((nn.Linear, 6, 7), (Layer, 7, 7), (nn.Linear, 7, 3))
        )

    def forward(self, x: Any) -> mz.Tensor:
        x = F.relu(self.first(x))
        x = x + F.relu(self.second(x))
        return self.last(x + F.relu(self.second(x)))


def boom_forward(x: mz.Tensor) -> mz.Tensor:
    raise BoomError


def boom_backward(x: mz.Tensor) -> mz.Tensor:
    """Raises when backward comes to the first use, after having been through the second."""
    uses.append(len(uses))
    number = uses[-1]

    def backward(gradient: Any) -> Any:
        if number == 0:
            raise BoomError
        return (gradient,)

    return record(mz.Tensor(x.data), (x,), backward, "boom")


uses: list[int] = []


def start(stage: type[mz.Engine], optimizer: str, dtype: str) -> mz.Engine:
    make = mz.Adam(1e-2) if optimizer == "Adam" else mz.SGD(0.1, momentum=0.9)
    return stage(Model(dtype), make, world)


def step(engine: mz.Engine, number: int, clip: bool = False) -> None:
    x, y = batch(number)
    engine.backward(F.cross_entropy(engine(x), y))
    if clip:
        engine.clip_grad_norm(0.5)
    engine.step()


def snapshot(engine: mz.Engine) -> Snapshot:
    state = engine.gather_optimizer_state()
    moments = {f"{name} {key}": value for name, values in state.items() for key, value in values.items()}
    assert moments, "there are no moments to compare"
    return {**engine.gather_parameters(), **moments, "steps": np.array([engine.steps])}


def same(got: Snapshot, wanted: Snapshot, what: str) -> None:
    assert got.keys() == wanted.keys(), f"{what}: {sorted(got)} instead of {sorted(wanted)}"
    for name, value in wanted.items():
        kind = f"u{value.dtype.itemsize}"
        assert (got[name].view(kind) == value.view(kind)).all(), f"{what}, rank {rank}: {name} has other bits"


def raises(kind: type[Exception], what: str, call: Callable[[], Any], *words: str) -> str:
    """The error's text, which must be the same on all ranks."""
    text = expect.raises(kind, call, *words, what=f"{what}, rank {rank}")
    assert len(set(world.mpi.allgather(text))) == 1, f"{what}: not the same error on all ranks; on rank {rank}: {text}"
    return text


def spoiled(value: float, who: int, module: str) -> Callable[[mz.Engine], None]:
    """One rank's gradient of one weight becomes `value` in one place, by its input or by what comes after it."""

    def go(engine: mz.Engine) -> None:
        x, y = batch(99)
        if rank == who and module == "first":
            x[2, 3] = value  # reaches the gradient of first.weight and, through the forward, all that follow
        if rank == who and module == "second":
            engine.model.second.spoil = lambda h: h * np.where(np.arange(7) == 2, np.float32(value), np.float32(1))  # type: ignore[attr-defined]
        try:
            engine.backward(F.cross_entropy(engine(x), y))
        finally:
            engine.model.second.spoil = None  # type: ignore[attr-defined]

    return go


def check(stage: type[mz.Engine], optimizer: str, dtype: str) -> None:
    title = f"{stage.__name__}, {optimizer}, {dtype}, N={N}"
    reference = start(stage, optimizer, dtype)
    trained = start(stage, optimizer, dtype)
    for number in range(2):
        step(reference, number)
        step(trained, number)
    at_rest = trained.memory()
    before = snapshot(trained)

    def nothing_happened(what: str) -> None:
        trained.zero_grad()
        assert trained.memory() == at_rest, f"{title}, {what}: holds {trained.memory()} instead of {at_rest}"
        same(snapshot(trained), before, f"{title}, after {what}")

    # One number on one rank.
    with np.errstate(all="ignore"):
        for value, who in ((np.inf, 0), (-np.inf, N - 1), (np.nan, 1)):
            for clip in (False, True):
                what = f"{value} on rank {who}" + (", clipped" if clip else "")
                spoiled(value, who, "first" if clip else "second")(trained)
                if clip:
                    norm = trained.clip_grad_norm(0.5)
                    assert not np.isfinite(norm), f"{title}, {what}: the norm is {norm}"
                words = ["step 3", "second.weight", "not finite", "nothing was updated", "zero_grad()"]
                raises(FloatingPointError, f"{title}, {what}", trained.step, *words)
                raises(FloatingPointError, f"{title}, {what}, again", trained.step, *words)
                nothing_happened(what)

    # One parameter only: it is named and the others are not.
    x, y = batch(98)
    trained.backward(F.cross_entropy(trained(x), y))
    unit = trained._unit_of[trained.model.last.bias]  # type: ignore[attr-defined]
    place = unit.spans[trained.model.last.bias].start + 1  # type: ignore[attr-defined]
    assert unit.gradient is not None
    if unit.gradient.size == unit.length:
        unit.gradient[place] = np.nan
    elif unit.chunk.start <= place < unit.chunk.stop:
        unit.gradient[place - unit.chunk.start] = np.nan
    text = raises(FloatingPointError, f"{title}, last.bias", trained.step, "the gradient of last.bias is not finite")
    assert "weight" not in text, text
    nothing_happened("a NaN in last.bias")

    # Calls that do not fit together, on some ranks.
    for gives, missing in (((0,), list(range(1, N))), (tuple(range(N - 1)), [N - 1])):
        trained.backward(F.cross_entropy(trained(x), y), examples=4 if rank in gives else None)
        raises(ValueError, f"{title}, examples on {gives}", trained.step, "examples=", f"{missing} left it out")
        nothing_happened("examples on some ranks")
    for examples in (None, 0):
        trained.backward(F.cross_entropy(trained(x[:0]), y[:0]), examples=examples)
        raises(ValueError, f"{title}, no examples", trained.step, "no rank had a single example")
        nothing_happened("a batch without examples")

    # Exceptions that the user catches, on all ranks.
    for where, spoil in (("forward", boom_forward), ("backward", boom_backward)):
        trained.model.second.spoil = spoil  # type: ignore[attr-defined]
        uses.clear()
        try:
            trained.backward(F.cross_entropy(trained(x), y))
        except BoomError:
            trained.model.second.spoil = None  # type: ignore[attr-defined]
        else:
            raise AssertionError(f"{title}: no exception in {where}")
        assert trained.memory() == at_rest, f"{title}: after an exception in {where}: {trained.memory()}, not {at_rest}"
        nothing_happened(f"an exception in {where}")

    # As if nothing of all that had been.
    for number in (2, 3):
        step(reference, number, clip=number == 3)
        step(trained, number, clip=number == 3)
    wanted = snapshot(reference)
    same(snapshot(trained), wanted, f"{title}, two steps later")
    assert all((before[name] != wanted[name]).any() for name in before if not name.endswith("bias")), "nothing moved"


for stage in mz.STAGES:
    for optimizer, dtype in (("Adam", "float32"), ("SGD", "bfloat16")):
        check(stage, optimizer, dtype)
sys.stdout.write(f"rank {rank} of {N}: done\n")
