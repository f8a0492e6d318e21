"""Does anything read memory that nobody has written? All of it is NaN here, and nothing may change.

mpirun -n 5 python tests/jobs/lifetime_poison.py

Every `xp.empty`, every scratch array at each use, and every whole vector when it is let go are filled with NaN.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import to_host, xp
from minizero.comm import Communicator
from minizero.flat import Unit
from minizero.optim import Scratch

poisoned: Counter[str] = Counter()


def poison(array: Any, why: str) -> Any:
    """All bits set: NaN in every floating dtype, and -1 or the largest number in others."""
    poisoned[why] += 1
    array.reshape(-1).view(np.uint8)[:] = 255
    return array


class PoisonedLibrary:
    """`xp`, but memory from `empty` is not what it happens to be: it is NaN."""

    def empty(self, shape: Any, dtype: Any = None) -> Any:
        return poison(xp.empty(shape, dtype), "empty")

    def __getattr__(self, name: str) -> Any:
        assert name != "empty_like", "this one would need poison, too"
        return getattr(xp, name)


def poisoned_after(method: Callable[..., Any], why: str) -> Callable[..., Any]:
    return lambda *args: poison(method(*args), why)


def unbind(unit: Unit) -> None:
    if unit._vector is not None:
        poison(unit._vector, "released")
    original_unbind(unit)


original_unbind = Unit.unbind
original_step = mz.Engine.step


def step(engine: mz.Engine) -> None:
    """Gradients are let go at the end of a step."""
    held = [unit.gradient for unit in engine.units if unit.gradient is not None]
    original_step(engine)
    for gradient in held:
        poison(gradient, "gradient")


@contextmanager
def poisonous() -> Iterator[None]:
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("minizero.") and hasattr(module, "xp"):
                patches.enter_context(mock.patch.object(module, "xp", PoisonedLibrary()))
        for owner, method, replacement in (
            (Communicator, "scratch", poisoned_after(Communicator.scratch, "ring")),
            (Scratch, "__call__", poisoned_after(Scratch.__call__, "scratch")),
            (Unit, "unbind", unbind),
            (mz.Engine, "step", step),
        ):
            patches.enter_context(mock.patch.object(owner, method, replacement))
        yield


def odd(dtype: str) -> nn.Module:
    """Odd sizes, and a layer that nobody uses: a unit without any gradient."""
    model = nn.MLP([7, 5, 9, 3], dtype=dtype)
    model.layers[1].parameters()[1].requires_grad = False
    model.unused = nn.Linear(3, 5, dtype=dtype)  # type: ignore[attr-defined]
    return model


def gpt(dtype: str) -> nn.Module:
    return nn.GPT(vocab=11, context=6, width=8, heads=2, layers=1, dropout=0.1, dtype=dtype)


def train(stage: type[mz.Engine], make: Callable[[str], nn.Module], dtype: str, comm: Communicator) -> list[Any]:
    generator = np.random.default_rng(comm.rank)
    engine = stage(make(dtype), mz.Adam(0.05, master=True), comm)
    for _ in range(3):
        for local in (True, False):
            if make is gpt:
                x: Any = generator.integers(0, 11, (2, 6))
                y = generator.integers(0, 11, (2, 6))
            else:
                x, y = generator.standard_normal((2, 7), np.float32), generator.integers(0, 3, 2)
            loss = F.cross_entropy(engine(x), y)
            if local:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        norm = engine.clip_grad_norm(0.1)
        engine.step()
    found = [*engine.gather_parameters().values(), np.array([norm])]
    for state in engine.gather_optimizer_state().values():
        found += state.values()
    for unit in engine.units:  # and what this rank itself holds, padding included
        found += [to_host(unit.weights), *map(to_host, (unit.state or {}).values())]
    return [array.copy() for array in found]


if __name__ == "__main__":
    comm = mz.Communicator()
    for make in (odd, gpt):
        for dtype in ("float32", "bfloat16"):
            for stage in mz.STAGES:
                clean = train(stage, make, dtype, comm)
                poisoned.clear()
                with poisonous():
                    found = train(stage, make, dtype, comm)
                where = f"rank {comm.rank}, {make.__name__}, {dtype}, {stage.__name__}"
                wanted = {"empty", "ring", "scratch", "gradient"} | ({"released"} if stage is mz.Zero3 else set())
                assert wanted <= set(poisoned), f"{where}: poisoned only {dict(poisoned)}"
                for i, (a, b) in enumerate(zip(clean, found, strict=True)):
                    same = a.reshape(-1).view(np.uint8) == b.reshape(-1).view(np.uint8)
                    assert same.all(), f"{where}: array {i} differs in {(~same).sum()} bytes"
    if comm.rank == 0:
        print("nothing read what nobody wrote")
