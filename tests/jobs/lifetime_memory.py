"""Does a rank hold the bytes of the table, and does `engine.memory()` say so?

mpirun -n 3 python tests/jobs/lifetime_memory.py

Three witnesses must agree: the formula, from the sizes of layers; `engine.memory()`; and tracemalloc's list of buffers.
"""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from lifetime_probe import drop_spare, live, spare
from traffic_table import padded

import minizero as mz
from minizero import functional as F
from minizero import nn

comm = mz.Communicator()
N = comm.size
SIZES = [60, 61, 37, 50]
VOCAB, WIDTH = 67, 12
BLOCK = 4 * WIDTH + 4 * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 4 * WIDTH + (4 * WIDTH + 1) * WIDTH


def layer(i: int) -> int:
    return (SIZES[i] + 1) * SIZES[i + 1]


def half_frozen(dtype: str) -> nn.Module:
    model = nn.MLP(SIZES, dtype=dtype)
    for parameter in model.layers[1].parameters():
        parameter.requires_grad = False
    return model


def gpt(dtype: str) -> nn.Module:
    return nn.GPT(vocab=VOCAB, context=9, width=WIDTH, heads=3, layers=2, dtype=dtype)


def vectors() -> tuple[Any, Any]:
    return np.ones((3, SIZES[0]), "float32"), np.zeros(3, "int64")


def tokens() -> tuple[Any, Any]:
    return np.arange(16).reshape(2, 8), np.zeros((2, 8), "int64")


Make: TypeAlias = Callable[[str], nn.Module]
Draw: TypeAlias = Callable[[], tuple[Any, Any]]
MODELS: list[tuple[Make, Draw, list[int], list[int]]] = [  # ..., elements of trained and frozen units
    (lambda dtype: nn.MLP(SIZES, dtype=dtype), vectors, [layer(0), layer(1), layer(2)], []),
    (half_frozen, vectors, [layer(0), layer(2)], [layer(1)]),
    (gpt, tokens, [VOCAB * WIDTH, 9 * WIDTH, BLOCK, BLOCK, 2 * WIDTH], []),
]


def table(stage: type[mz.Engine], trained: int, frozen: int, b: int, master: bool) -> dict[str, int]:
    """Weights, gradients, optimizer: DP 1, 1, 1; ZeRO-1 1, 1, 1/N; ZeRO-2 1, 1/N, 1/N; ZeRO-3 all of it / N."""
    w, g, o = ((1, 1, 1), (1, 1, N), (1, N, N), (N, N, N))[mz.STAGES.index(stage)]
    m = 4 if master and b == 2 else 0
    terms = b * (trained + frozen) // w, b * trained // g, (8 + m) * trained // o
    return dict(zip(("weights", "gradients", "optimizer"), terms, strict=True))


def check(make: Make, draw: Draw, trained: int, frozen: int, dtype: str, master: bool, stage: type[mz.Engine]) -> None:
    b = 2 if dtype == "bfloat16" else 4
    where, expected = (
        f"rank {comm.rank}, {stage.__name__}, {dtype}, {master=}",
        table(stage, trained, frozen, b, master),
    )
    x, y = draw()
    drop_spare(comm)
    gc.collect()
    before = live()
    engine = stage(make(dtype), mz.Adam(master=master), comm)
    assert engine.memory() == {**expected, "gradients": 0, "optimizer": 0}, f"{where}: {engine.memory()}"
    for _ in range(2):
        with engine.no_sync():
            engine.backward(F.cross_entropy(engine(x), y))
            assert engine.memory()["gradients"] == b * trained, f"{where}: not whole gradients under no_sync"
        engine.backward(F.cross_entropy(engine(x), y))
        at_rest = engine.memory()
        total = live() - before - spare(engine)
        engine.step()
    assert at_rest == expected, f"{where}: memory() says {at_rest}, the table {expected}"
    assert abs(total - sum(expected.values())) < 16, f"{where}: {total} bytes live, the table says {expected}"
    assert engine.memory() == {**expected, "gradients": 0}, f"{where}: after the step {engine.memory()}"
    left, kept = live() - before - spare(engine), sum(expected.values()) - expected["gradients"]
    assert abs(left - kept) < 16, f"{where}: {left} bytes live after the step, not {kept}"


checked = 0
gc.disable()
tracemalloc.start()
for number, (make, draw, trained_units, frozen_units) in enumerate(MODELS):
    trained, frozen = (sum(padded(unit, N) for unit in units) for units in (trained_units, frozen_units))
    for kind, (dtype, master) in enumerate((("float32", False), ("bfloat16", False), ("bfloat16", True))):
        for stage in mz.STAGES:
            if N < 8 or kind == number:  # with many ranks, to save time, each model in one kind
                check(make, draw, trained, frozen, dtype, master, stage)
                checked += 1
if comm.rank == 0:
    print(f"{checked} engines hold what the table says")
