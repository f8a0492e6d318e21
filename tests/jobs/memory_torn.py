"""Refuse each allocation of a training step in turn: no update may be torn."""

import sys
from types import FrameType
from typing import Any

import numpy as np

import minizero as mz
from minizero import allocator, memory, nn
from minizero import functional as F
from minizero.nn import Linear


class Mixed(nn.Module):
    """Units of three dtypes, so that each needs scratch of its own."""

    def __init__(self) -> None:
        self.layers = [
            Linear(60, 50, dtype="bfloat16"),
            Linear(50, 40, dtype="float64"),
            Linear(40, 70, dtype="bfloat16"),
        ]

    def forward(self, x: Any) -> mz.Tensor:
        for layer in self.layers:
            wide = "float64" if layer.weight.dtype == "float64" else "float32"
            x = F.relu(layer(F.astype(x, wide)))
        return x


class Refuse:
    """Refuses the allocation number `at` that it hears of."""

    def __init__(self, at: int) -> None:
        self.at, self.heard = at, 0

    def __call__(self, size: int, frame: FrameType | None) -> bool:
        if size < memory.SMALL:
            return True
        self.heard += 1
        return self.heard - 1 != self.at


comm = mz.Communicator()
rng = np.random.default_rng(comm.rank)
data = [(rng.standard_normal((3, 60), dtype=np.float32), rng.integers(0, 70, 3)) for _ in range(3)]
watch = allocator.watch()


def held(engine: mz.Engine) -> dict[str, bytes]:
    """The bits of all that a step may change, on this rank."""
    found = {f"weights of {unit.name}": unit.weights.tobytes() for unit in engine.units}
    for unit in engine.units:
        found |= {f"{key} of {unit.name}": array.tobytes() for key, array in (unit.state or {}).items() if array.any()}
    return found


def train(engine: mz.Engine, step: int) -> None:
    x, y = data[step]
    engine.backward(F.cross_entropy(engine(x), y))


def make(stage: type[mz.Engine]) -> mz.Engine:
    return stage(Mixed(), mz.Adam(1e-2, master=True), comm)


refused = {"step": 0, "backward": 0}
for stage in mz.STAGES:
    undisturbed = make(stage)
    for step in range(3):
        train(undisturbed, step)
        undisturbed.step()
    for first in (0, 1):  # the step that fails: moments do not exist, or do
        for phase in refused:
            at = 0
            while True:
                engine = make(stage)
                for step in range(first):
                    train(engine, step)
                    engine.step()
                if phase == "step":
                    train(engine, first)
                before, listener = held(engine), Refuse(at)
                watch.listen(listener)
                try:
                    if phase == "step":
                        engine.clip_grad_norm(0.5)
                        engine.step()
                    else:
                        train(engine, first)
                except MemoryError:
                    pass
                else:
                    break
                finally:
                    watch.leave(listener)
                after = held(engine)
                fresh = {key for key in after if key not in before and key.startswith("master")}
                changed = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in fresh]
                where = f"{stage.__name__}, step {first}, {phase}, allocation {at}"
                assert not changed, f"{where}: torn: {changed}"
                assert engine.steps == first, where
                whole = [unit.name for unit in engine.units if unit.whole and stage is mz.Zero3]
                assert not whole, f"{where}: still gathered: {whole}"
                engine.zero_grad()
                for step in range(first, 3):
                    train(engine, step)
                    engine.step()
                assert held(engine) == held(undisturbed), f"{where}: training goes on with other bits"
                refused[phase] += 1
                at += 1
if comm.rank == 0:
    print(refused)
sys.exit(0 if all(refused.values()) else 1)
