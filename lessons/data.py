"""What do the lessons learn from, and who gets which slice?

Two small things that ship with the course: handwritten digits (`digits.csv`; DATA.md says where from) for
the MLP, and the lessons' own prose, character by character, for the GPT. Each comes as two arrays, x and y,
with one example per row.

Each step has a global batch, drawn from (seed, step) alone: every rank draws the same one, without a message,
and takes its own contiguous slice. Together the ranks see each example of the batch exactly once, at any N:

    global batch      7  2  9  4  0  5  8  1      the numbers of eight examples
    N = 2             0  0  0  0  1  1  1  1      the rank that takes each
    N = 3             0  0  0  1  1  1  2  2      uneven, but none is dropped and none is seen twice
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
TRAIN = 1500  # of the 1,797 digits; the other 297 are for testing
NOT_PROSE = re.compile(r"^[ \t]*(`{3,}).*?^[ \t]*\1`*$|<!--.*?-->", re.MULTILINE | re.DOTALL)

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def digits() -> tuple[Floats, Integers, Floats, Integers]:
    """Return (train_x, train_y, test_x, test_y): the same shuffled split on every rank and in every run.

    train_x (1500, 64) and test_x (297, 64) are float32 in 0..1: an 8x8 picture's rows back to back. train_y
    (1500,) and test_y (297,) are int64: the digits 0 to 9.
    """
    table = np.loadtxt(HERE / "digits.csv", delimiter=",", dtype=np.int64)  # (1797, 65): pixels 0..16, digit
    table = table[np.random.default_rng(0).permutation(len(table))]
    x, y = (table[:, :64] / 16).astype(np.float32), table[:, 64].copy()  # k/16 is exact in float32
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def text(context: int) -> tuple[Integers, Integers, str]:
    """Return (x, y, vocabulary) of the lessons' prose: y holds the character that follows each one of x.

    x and y are (windows, context), int64, read-only views; window i starts at character i. The vocabulary is
    a sorted string of the characters that occur; vocabulary[token] is the character of a token. Fenced blocks
    are left out: they hold what the programs print, and no program must learn from what its last run printed.

    Raises:
        ValueError: the prose is no longer than `context`.
    """
    files = sorted(HERE.glob("[0-9][0-9]_*.md"))
    prose = NOT_PROSE.sub("", "\n".join(file.read_text(encoding="utf-8") for file in files))
    if len(prose) <= context:
        raise ValueError(f"the {len(prose)} characters of {HERE}/NN_*.md are too few for context={context}")
    vocabulary = "".join(sorted(set(prose)))
    token = {character: number for number, character in enumerate(vocabulary)}
    tokens = np.array([token[character] for character in prose], dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, context)  # (len(prose) - context + 1, context)
    return windows[:-1], windows[1:], vocabulary


def global_batch(examples: int, batch: int, step: int, seed: int = 0) -> Integers:
    """Return the numbers (batch,), int64, of the examples of one step: all different, the same on every rank.

    Raises:
        ValueError: `batch` is larger than `examples`.
    """
    return np.random.default_rng((seed, step)).choice(examples, batch, replace=False)


def share(rows: Array, rank: int, size: int) -> Array:
    """Return a view of one rank's contiguous slice: the first len(rows) % size ranks have one row more.

    With fewer rows than ranks the last ranks' slices are empty.
    """
    return np.array_split(rows, size)[rank]


def batches(
    x: Array, y: Array, batch: int, steps: Iterable[int], rank: int = 0, size: int = 1, seed: int = 0
) -> Iterator[tuple[Array, Array]]:
    """Yield (x, y) for each step: copies of this rank's slice of a global batch of `batch` examples.

    `steps` are the numbers of the steps: `range(20)` trains, and `range(10, 20)` resumes after the first ten.
    """
    for step in steps:
        mine = share(global_batch(len(x), batch, step, seed), rank, size)
        yield x[mine], y[mine]
