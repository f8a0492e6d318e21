"""All stages have the same bits, and they are the right ones. What could hide a difference is tested here, too."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

import minizero as mz
from launch import ROOT, run_ranks
from models import PROBLEMS
from oracle import Oracle, Vector, differing, divided, same_bits

sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from proof_cases import AXES, EVERY_PAIR, NS, STATES, STEPS, cases, pairs

JOBS = ROOT / "tests" / "jobs"


def expected(n: int, part: str = "") -> Counter[str]:
    """How many comparisons of each kind the proof at n ranks has to make, for cases whose text contains the part."""
    chosen = [case for case in cases(n) if part in str(case)]
    counts: Counter[str] = Counter(cases=len(chosen))
    for case in chosen:
        parameters = PROBLEMS[case.problem].build(0, case.dtype).parameters()
        tensors = len(parameters)
        for parameter in parameters:
            if parameter.requires_grad:
                tensors += sum(key != "master" or parameter.dtype == "bfloat16" for key in STATES[case.optimizer])
        stages = len(case.stages)
        counts["start"] += n * stages * len(parameters)
        counts["truth"] += n * stages * STEPS[n] * tensors
        counts["data parallelism"] += n * (stages - 1) * STEPS[n] * tensors
        counts["losses"] += n * stages * STEPS[n] * case.micros
        counts["norms"] += n * stages * STEPS[n] * (case.clip is not None)
    return counts


@pytest.mark.parametrize("n", NS)
def test_every_weight_and_moment_of_every_stage_on_every_rank_after_every_step_is_the_truth(n: int) -> None:
    done = run_ranks(n, JOBS / "proof.py", timeout=400)
    assert json.loads(done.stdout) == expected(n)
    assert expected(n)["truth"] > 4000 * n


def test_the_proof_covers_what_it_says() -> None:
    everywhere = set[Any]()
    for n in NS:
        here = set[Any]().union(*map(pairs, cases(n)))
        assert {pair for pair in EVERY_PAIR - here if pair[0] > 0} == set()
        assert {case.problem for case in cases(n)} == set(PROBLEMS)
        for problems in (("mlp",), ("gpt tied", "gpt untied")):
            found = {(case.dtype, case.optimizer) for case in cases(n) if case.problem in problems}
            assert len(found) == len(AXES[1]) * len(AXES[2]) - 1  # a master copy is of bfloat16 only
        assert cases(n) == cases(n)
        everywhere |= here
    assert everywhere == EVERY_PAIR
    assert len({tuple(cases(n)) for n in NS}) == len(NS)


@pytest.mark.parametrize("n", [2, 5])
def test_every_stage_learns_what_one_process_learns_from_the_undivided_batch(n: int) -> None:
    done = run_ranks(n, JOBS / "proof_undivided.py", timeout=400)
    found = json.loads(done.stdout)
    assert found["compared"] == 4 * 155  # trained tensors of its cases, in each stage
    assert 0 < found["float64"] < 1e-12 and 0 < found["float32"] < 1e-4


# What follows needs no ranks: would the proof see the faults that it is there for?


class Backwards(Oracle):
    """A ring that runs the other way: chunk c is added in the order c - 1, c - 2, ..., c."""

    def order(self, chunk: int) -> list[int]:
        return [(chunk - 1 - i) % self.n for i in range(self.n)]


class Fused(Oracle):
    """All gradients in one buffer: other chunks, so other orders."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.units = [[name for names in self.units for name in names]]


class MeanFirst(Oracle):
    """Each rank divides by the number of ranks, then they add."""

    def sum_over_ranks(self, vectors: list[Vector]) -> Vector:
        return super().sum_over_ranks([divided(vector, self.n) for vector in vectors])

    def mean(self, vector: Vector, count: int) -> Vector:
        return vector


def after_one_step(kind: type[Oracle], n: int, micros: int = 1, **options: Any) -> Oracle:
    problem = PROBLEMS["mlp"]
    generator = np.random.default_rng(n)
    batches = [[problem.draw(generator, 4) for _ in range(micros)] for _ in range(n)]
    oracle = kind(problem.build(), mz.SGD(lr=1.0, momentum=0.9), n)
    oracle.step(problem.loss, batches, **options)
    return oracle


def changed(first: Oracle, second: Oracle) -> tuple[bool, bool]:
    """Do weights and do moments differ in their bits? They must be equal up to rounding."""
    weights = moments = 0
    for name, x in first.weights.items():
        np.testing.assert_allclose(x, second.weights[name], rtol=1e-5, atol=1e-6)
        weights += differing(x, second.weights[name])
        moments += differing(first.state[name]["momentum_buffer"], second.state[name]["momentum_buffer"])
    return weights > 0, moments > 0


@pytest.mark.parametrize(
    ("fault", "seen", "unseen"),
    [
        (Backwards, (5, 8), (1, 2, 3)),  # of three summands only the choice of the last one matters
        (Fused, (3, 5, 8), (1, 2)),
        (MeanFirst, (3, 5), (1, 2, 4, 8)),  # a division by a power of two is exact
    ],
)
def test_another_order_of_operations_changes_float32_bits(
    fault: type[Oracle], seen: tuple[int, ...], unseen: tuple[int, ...]
) -> None:
    for n in seen:
        assert changed(after_one_step(Oracle, n), after_one_step(fault, n)) == (True, True), n
    for n in unseen:
        assert changed(after_one_step(Oracle, n), after_one_step(fault, n)) == (False, False), n


def test_adding_micro_batches_before_the_ranks_changes_float32_bits() -> None:
    """So `no_sync` has bits of its own, and equality under it says something of its own."""
    for n in (3, 5, 8):
        each = after_one_step(Oracle, n, 3)
        for no_sync in (True, [True, False, False]):
            assert changed(each, after_one_step(Oracle, n, 3, no_sync=no_sync)) == (True, True), (n, no_sync)
    assert changed(after_one_step(Oracle, 1, 3), after_one_step(Oracle, 1, 3, no_sync=True)) == (False, False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_bit_of_one_element_is_seen(dtype: str) -> None:
    oracle = Oracle(PROBLEMS["mlp"].build(0, dtype), mz.SGD(lr=1.0), 3)
    x = oracle.weights["layers.0.weight"]
    y = x.copy()
    assert same_bits(x, y)
    y.reshape(-1).view(f"uint{8 * y.itemsize}")[17] ^= 1
    assert differing(x, y) == 1 and not same_bits(x, y)
    zero = np.zeros(3, x.dtype)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.reshape(3, 1)) and not same_bits(zero, zero.astype("float64"))
