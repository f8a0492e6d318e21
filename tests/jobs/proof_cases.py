"""Which combinations the proof runs: not all of them, but

- at every N each problem, and the MLP and a GPT with each optimizer in each dtype;
- at every N every pair of other settings that can meet (an optimizer with clipping, no_sync with empty slices ...);
- at some N every pair of a problem and another setting.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import minizero as mz
from models import PROBLEMS

NS = (1, 2, 3, 5, 8)
STEPS = {1: 3, 2: 3, 3: 3, 5: 3, 8: 2}  # in the second, moments and published weights are used
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: mz.SGD(lr=4.0),
    "momentum": lambda: mz.SGD(lr=2.0, momentum=0.9),
    "adam": lambda: mz.Adam(lr=0.05, weight_decay=0.1),
    "adam master": lambda: mz.Adam(lr=0.05, weight_decay=0.1, master=True),
}
STATES = {  # what each keeps for a trained tensor
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adam master": ("exp_avg", "exp_avg_sq", "master"),
}
CLIP = 0.05  # below every norm


class Case(NamedTuple):
    problem: str
    dtype: str
    optimizer: str
    accumulation: str  # how many micro-batches a step, and which of them are inside no_sync
    clip: float | None
    slices: str  # "even"; "uneven": 3 and 5 examples; "empty": many a rank has none

    @property
    def no_sync(self) -> list[bool]:
        """For each micro-batch: is it inside no_sync?"""
        return {"1": [False], "3": [False] * 3, "no_sync": [True, True, False], "mixed": [False, True, False]}[
            self.accumulation
        ]

    @property
    def micros(self) -> int:
        return len(self.no_sync)

    @property
    def stages(self) -> tuple[type[mz.Engine], ...]:
        """Under ZeRO-3 every rank must run the same layers."""
        return mz.STAGES[:3] if self.problem == "skipping" else mz.STAGES

    def examples(self, n: int) -> list[list[int]]:
        """[rank][micro-batch]"""

        def count(rank: int, micro: int) -> int:
            if self.slices == "empty":
                return 2 if (rank + 2 * micro) % 3 == min(n - 1, 1) else 0
            return 4 if self.slices == "even" else 3 + 2 * ((rank + micro) % 2)

        return [[count(rank, micro) for micro in range(self.micros)] for rank in range(n)]


AXES = (
    tuple(PROBLEMS),
    ("float32", "bfloat16"),
    tuple(OPTIMIZERS),
    ("1", "3", "no_sync", "mixed"),
    (None, CLIP, 1e6),
    ("even", "uneven", "empty"),
)


Pair = tuple[int, Any, int, Any]  # axis, setting, axis, setting


def allowed(case: Case) -> bool:
    """A master copy is kept of 16-bit weights only."""
    return case.dtype == "bfloat16" or case.optimizer != "adam master"


def pairs(case: Case) -> set[Pair]:
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(AXES)), 2)}


EVERY_PAIR = set[Pair]().union(*map(pairs, filter(allowed, map(Case._make, itertools.product(*AXES)))))


def cases(n: int) -> list[Case]:
    """The same on every machine."""
    done = set[Pair]()  # at the numbers of ranks that come before
    for ranks in (*NS, n):
        chosen = choose(ranks, done)
        done.update(*map(pairs, chosen))
        if ranks == n:
            break
    return chosen


def choose(n: int, done: set[Pair]) -> list[Case]:
    draw = random.Random(n)
    chosen: list[Case] = []

    def random_case(**fixed: Any) -> Case:
        found = (Case(*map(draw.choice, AXES))._replace(**fixed) for _ in itertools.count())  # type: ignore[arg-type]
        return next(filter(allowed, found))

    def add(**fixed: Any) -> None:
        """Of some random cases, that which has the most new pairs: new at this N, or with this problem."""
        fresh = EVERY_PAIR.difference(*map(pairs, chosen))
        fresh -= {pair for pair in done if pair[0] == 0}
        chosen.append(max((random_case(**fixed) for _ in range(20)), key=lambda case: len(pairs(case) & fresh)))

    gpts = itertools.cycle(("gpt tied", "gpt untied"))
    for dtype, optimizer in itertools.product(AXES[1], AXES[2]):
        if dtype == "bfloat16" or optimizer != "adam master":
            add(problem="mlp", dtype=dtype, optimizer=optimizer)
            add(problem=next(gpts), dtype=dtype, optimizer=optimizer)
    for problem in PROBLEMS:
        if problem not in {case.problem for case in chosen}:
            add(problem=problem)

    def missing() -> list[Pair]:
        """What must still be run at this N; at the last N, also what was run at none."""
        left = EVERY_PAIR.difference(*map(pairs, chosen))
        return sorted((pair for pair in left if pair[0] > 0 or (n == NS[-1] and pair not in done)), key=str)

    while left := missing():
        i, first, j, second = left[0]
        add(**{Case._fields[i]: first, Case._fields[j]: second})
    return chosen
