"""Does a step need the bytes that plan.py predicts, and are those at rest exact?

mpirun -n 8 python tests/jobs/plan_peaks.py [-v]

The allocator says what was there, the replay of the schedule what should be (plan.py). They share no code.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
from lifetime_probe import drop_spare

import minizero as mz
from minizero import allocator, memory, nn, plan
from minizero import functional as F
from minizero.sizes import Sizes

comm = mz.Communicator()
N = comm.size
VERBOSE = "-v" in sys.argv and comm.rank == 0
BATCH, TIME = 4, 16
LAYERS = [256] * 9 + [10]
GPT = {"vocab": 50, "context": TIME, "width": 64, "heads": 4, "layers": 8}
OPTIMIZERS: dict[str, Callable[[bool], mz.Optimizer]] = {
    "adam": lambda master: mz.Adam(master=master),
    "momentum": lambda master: mz.SGD(0.1, momentum=0.9, master=master),
    "sgd": lambda master: mz.SGD(0.1, master=master),
}
worst = 0.0


class Peaks:
    """The largest number of bytes in each phase; whoever calls the engine says which one it is."""

    def __init__(self) -> None:
        self.watch, self.phase = allocator.watch(), ""
        self.highest: dict[str, int] = {}

    def asked(self, size: int, frame: FrameType | None) -> bool:
        self.highest[self.phase] = max(self.highest.get(self.phase, 0), self.watch.live() + size)
        return True


def mlp(dtype: str) -> tuple[nn.Module, Sizes, Any, Any]:
    batch = np.ones((BATCH, LAYERS[0]), "float32"), np.zeros(BATCH, "int64")
    return nn.MLP(LAYERS, dtype=dtype), plan.mlp(LAYERS, BATCH), *batch


def gpt(dtype: str, tied: bool = True) -> tuple[nn.Module, Sizes, Any, Any]:
    tokens = np.ones((1, TIME), "int64")
    return nn.GPT(**GPT, tied=tied, dtype=dtype), plan.gpt(**GPT, tied=tied, batch=1), tokens, tokens


def untied(dtype: str) -> tuple[nn.Module, Sizes, Any, Any]:
    return gpt(dtype, tied=False)


def talkative(dtype: str) -> tuple[nn.Module, Sizes, Any, Any]:
    """Most of its parameters are the one tied matrix, whose two gradients are added."""
    tokens = np.ones((1, 8), "int64")
    size: dict[str, Any] = {**GPT, "vocab": 4000, "context": 8, "layers": 2}
    return nn.GPT(**size, dtype=dtype), plan.gpt(**size, batch=1), tokens, tokens


def step(engine: mz.Engine, x: Any, y: Any, k: int, peaks: Peaks) -> dict[str, int]:
    """One step of k micro-batches. Returns what the engine held before the update."""
    for _ in range(k):
        peaks.phase = "forward"
        loss = F.cross_entropy(engine(x), y)
        peaks.phase = "backward"
        engine.backward(loss)
        del loss
    held = engine.memory()
    peaks.phase = "step"
    engine.step()
    return held


def check(make: Callable[[str], Any], recipe: plan.Recipe, stage: int, k: int = 1) -> None:
    global worst
    word, kind = plan.STAGES[stage], mz.STAGES[stage]
    where = f"rank {comm.rank} of {N}, {make.__name__}, {recipe}, {word}, {k} micro-batches"
    model, sizes, x, y = make(recipe.dtype)
    drop_spare(comm)
    peaks = Peaks()
    peaks.watch.listen(peaks.asked)
    peaks.phase = "building"
    engine = kind(model, OPTIMIZERS[recipe.optimizer](recipe.master), comm)
    step(engine, x, y, k, peaks)
    early, peaks.highest = peaks.highest, {}
    held = step(engine, x, y, k, peaks)
    peaks.watch.leave(peaks.asked)
    for seen, first in ((early, True), (peaks.highest, False)):
        predicted = {p: sum(t.values()) for p, t in plan.peaks(sizes, recipe, word, N, k, first).items()}
        for phase in plan.PHASES[0 if first else 1 :]:
            off = predicted[phase] / seen[phase] - 1
            worst = max(worst, abs(off))
            if VERBOSE:
                print(
                    f"{where} {first=} {phase:8} measured {seen[phase]:9,} predicted {predicted[phase]:9,} {off:+.2%}"
                )
            assert abs(off) < 0.01, f"{where}, {first=}, {phase}: measured {seen[phase]}, predicted {predicted[phase]}"
    exact = plan.at_rest(sizes, recipe, word, N)
    assert held == exact, f"{where}: {held} held at rest, predicted {exact}"
    units = [(u.name, tuple(p.size for p in u.parameters)) for u in engine.units]
    assert units == [(u.name, u.parameters) for u in sizes.units], f"{where}: other units: {units}"
    assert plan.recipe_of(engine) == recipe, f"{where}: recipe_of says {plan.recipe_of(engine)}"
    found = plan.sizes_of(engine)
    known = tuple(replace(u, activations=0, draw=12) for u in sizes.units)
    assert found.units == known, f"{where}: sizes_of says {found.units}"
    spread = plan.sizes_of(engine, sizes.activations)  # without a word on operations
    rough = max(sum(terms.values()) for terms in plan.peaks(spread, recipe, word, N, k).values())
    off = rough / max(peaks.highest.values()) - 1
    if VERBOSE:
        print(f"{where} from the engine's units alone {off:+.2%}")
    assert abs(off) < 0.07, f"{where}: from the engine's units alone, the peak is predicted {off:+.2%} off"


def check_activations(make: Callable[[str], Any], dtype: str, stage: int) -> None:
    """To the byte: what the forward leaves. At the step, the three terms are those at rest."""
    model, sizes, x, y = make(dtype)
    drop_spare(comm)
    engine = mz.STAGES[stage](model, mz.Adam(), comm)
    step(engine, x, y, 1, Peaks())
    with memory.measure(engine) as seen:
        step(engine, x, y, 1, Peaks())
    where = f"rank {comm.rank} of {N}, {make.__name__}, {dtype}, {plan.STAGES[stage]}"
    assert seen.activations == sizes.activations, f"{where}: {seen.activations} measured, plan: {sizes.activations}"
    later = plan.peaks(sizes, plan.Recipe(dtype), plan.STAGES[stage], N)
    for phase, terms in (("step", plan.TERMS[:3]), ("forward", plan.TERMS)):
        measured = {term: seen.peaks[phase][term] for term in terms}
        for term in terms:
            off = abs(later[phase][term] - measured[term])
            assert off <= 256, f"{where}, {phase}: {measured} measured, predicted {later[phase]}"


bf16, master = plan.Recipe(), plan.Recipe(master=True)
runs: list[tuple[Callable[[str], Any], plan.Recipe, int]] = [(mlp, bf16, 1), (gpt, bf16, 1)]
if N < 8:
    runs += [
        (gpt, plan.Recipe("float32"), 1),
        (untied, bf16, 1),
        (talkative, bf16, 1),
        (mlp, master, 2),
        (untied, plan.Recipe("float64", "momentum"), 2),
        (mlp, plan.Recipe("float32", "sgd"), 2),
    ]
for make, recipe, k in runs:
    for stage in range(4):
        check(make, recipe, stage, k)
if N < 8:
    check_activations(gpt, "bfloat16", 0)
    check_activations(gpt, "bfloat16", 3)
    check_activations(mlp, "float32", 1)
if comm.rank == 0:
    print(f"{4 * len(runs)} engines: no phase of a step is further from the plan than {worst:.2%}")
