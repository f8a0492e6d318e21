"""Cases in which real frameworks went wrong for real users: does training come out right here, in every stage?

Bits; Lifetime of gradients and gathered weights; Shapes; Who is who. Adam and bad numbers are in test_cases_numbers.py.
What each case does stands in jobs/cases_bits.py, cases_lifetime.py, cases_shapes.py and cases_who.py; what must come
out of it, here. "unlike" lists the tensors that differ from the truth (or from an undisturbed run) in a single bit.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from launch import ROOT
from models import PROBLEMS

sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from cases_results import Cases, Facts, agreed

case = Cases("cases_training.py")
STAGES = ("DataParallel", "Zero1", "Zero2", "Zero3")


@pytest.fixture
def facts(n: int, request: pytest.FixtureRequest) -> list[Facts]:
    return case.facts(n, request.function.__name__)


def truth(tensors: int, moments: int, steps: int = 2, stages: int = 4) -> Facts:
    """So many tensors were compared, and none differs: parameters at the start, and with moments after each step."""
    return {"compared": stages * (tensors + steps * (tensors + moments)), "unlike": [], "still": []}


# Bits


@case(3, 4)
def test_gradients_reduced_as_one_vector_or_as_many_give_the_same_parameters(facts: list[Facts]) -> None:
    """Bits: the very same where sums are exact, whatever the sizes; else up to rounding, and each in all stages."""
    found = agreed(facts)
    assert found["exact, one"] == found["exact, many"] == {"compared": 4 * (3 + 1 + 3 + 3 + 3 + 4), "unlike": []}
    layers = 2 * (2 + 4)  # weights and biases of two models
    assert found["one"] == found["many"] == truth(layers, layers)
    assert found["bits apart"] > 0 and found["apart"] < 1e-6  # additions are in another order


@case(2, 3)
def test_two_micro_batches_add_up_in_every_stage_as_in_one_process(facts: list[Facts]) -> None:
    """Bits"""
    assert agreed(facts) == {"SGD": truth(6, 0), "Adam": truth(6, 2 * 6)}


@case(3, 5)
def test_clipping_by_one_norm_gives_the_same_update_on_all_ranks_and_in_all_stages(facts: list[Facts]) -> None:
    """Bits: of 49, 77 and 55 parameters. JSON keeps every bit of a float."""
    found = agreed(facts)
    norms, after = found.pop("norms"), found.pop("after")
    assert found == truth(4, 4, steps=3)
    assert all(norms[stage] == norms["truth"] for stage in STAGES), norms
    assert min(norms["truth"]) > 0.1, "there was nothing to clip"
    assert after == [pytest.approx(0.1, rel=1e-6)] * 4


@case(3)
def test_a_tied_weight_stays_tied_and_is_counted_once_over_eight_steps(facts: list[Facts]) -> None:
    """Bits: of a GPT with 13 words, 6 places, 8 channels and 2 blocks."""
    found = agreed(facts)
    parameters, elements = 2 + 2 * 16 + 2, 13 * 8 + 6 * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8
    names = ["token.weight", "token.weight:exp_avg", "token.weight:exp_avg_sq"]
    for stage in STAGES:
        assert found.pop(stage) == {"tied": True, "names": names, "elements": elements}, stage
    assert found == truth(parameters, 2 * parameters, steps=8)


@case(3)
def test_two_engines_that_take_turns_have_the_bits_of_each_alone(facts: list[Facts]) -> None:
    """Bits, a relative: what engines share is no one's state."""
    assert agreed(facts) == {"compared": 4 * 3 * (6 + 6), "unlike": []}


@case(3)
def test_an_evaluation_between_micro_batches_leaves_no_trace(facts: list[Facts]) -> None:
    """Bits, a relative"""
    assert agreed(facts) == truth(6, 6)


@case(2, 3)
def test_micro_batches_that_use_different_layers_add_up(facts: list[Facts]) -> None:
    """Bits, a relative"""
    assert agreed(facts) == truth(6, 6)


# Lifetime of gradients and gathered weights


@case(3, 5)
def test_a_layer_used_twice_is_trained_right(facts: list[Facts]) -> None:
    """Lifetime"""
    assert agreed(facts) == truth(6, 6)


@case(2, 3)
def test_the_norm_does_not_grow_with_ranks_or_micro_batches(facts: list[Facts], n: int) -> None:
    """Lifetime: the same 12 examples in N x k slices have the norms that one process finds for all 12."""
    problem = PROBLEMS["mlp"]
    model, wanted = problem.build(), []
    model.materialise()
    for step in range(2):
        problem.loss(model, problem.draw(np.random.default_rng(step), 12)).backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        wanted.append(math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in gradients)))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.bind(parameter.data - 0.5 * gradient)
            parameter.grad = None
    found = agreed(facts)
    assert found.keys() == {f"{stage}, k = {k}" for stage in STAGES for k in ((1, 3) if n == 2 else (1, 2))}
    assert wanted[0] > 0.1 and all(norms == pytest.approx(wanted, rel=1e-5) for norms in found.values()), found


@case(3)
def test_memory_that_nobody_has_written_is_never_read(facts: list[Facts]) -> None:
    """Lifetime"""
    found = agreed(facts)
    everywhere = ["empty", "gradient", "ring", "scratch"]
    for stage in STAGES:
        poisoned = sorted([*everywhere, "released"]) if stage == "Zero3" else everywhere
        assert found.pop(stage) == poisoned, stage
    compared = 4 * (13 + 2 * 12 + 13)  # with the moments of 12 trained ones by Adam, then with SGD's none
    assert found == {"compared": compared, "unlike": [], "NaN": []}


@case(3)
def test_an_exception_in_a_forward_leaves_nothing_gathered_and_no_trace(facts: list[Facts]) -> None:
    """Lifetime: raised in the first, the middle and the last of three layers, and caught; without zero_grad."""
    found = agreed(facts)
    assert found.pop("unlike") == [] and found.pop("caught") == 4 * 3
    for where, held in found.items():
        whole = 0 if where.startswith("Zero3") else 3
        assert held == {"whole": whole, "alive": whole, "more held": False}, where
    assert len(found) == 4 * 3


@case(3)
def test_what_zero_grad_forgets_has_never_been(facts: list[Facts]) -> None:
    """Lifetime"""
    assert agreed(facts) == {"forgotten": 4 * 4, "unlike": [], "more held": []}


@case(3)
def test_a_layer_that_calls_itself_is_whole_until_the_outermost_call_ends(facts: list[Facts]) -> None:
    """Lifetime, a relative"""
    assert agreed(facts) == truth(5, 5)


@case(3)
def test_graphs_that_wait_are_run_backward_in_any_order(facts: list[Facts]) -> None:
    """Lifetime, a relative: meanwhile no weight is kept whole for them under ZeRO-3."""
    whole = {**dict.fromkeys(STAGES[:3], 3), "Zero3": 0}
    assert agreed(facts) == {"compared": 4 * 2 * (6 + 6), "unlike": [], "whole": whole}


@case(3)
def test_a_failed_forward_with_dropout_leaves_no_trace_after_zero_grad(facts: list[Facts]) -> None:
    """Lifetime, a relative"""
    assert agreed(facts) == {"caught": 4 * 2, "unlike": []}


@case(3)
def test_a_loss_from_before_the_last_step_is_refused_and_leaves_no_trace(facts: list[Facts]) -> None:
    """Lifetime, a relative"""
    for found in facts:
        assert found["unlike"] == [] and found["whole"] == [3] * 6 + [0] * 2
        assert len(found["refused"]) == 4 * 2
        assert all("by step()" in text and "forward again" in text for text in found["refused"]), found["refused"]


@case(3)
def test_a_forward_that_failed_has_drawn_nothing(facts: list[Facts]) -> None:
    """Lifetime, a relative"""
    assert agreed(facts) == {"caught": 4 * 2, "unlike": []}


# Shapes


@case(3, 5)
def test_empty_and_scalar_parameters_train_and_keep_their_shapes(facts: list[Facts]) -> None:
    """Shapes: (0,), (8, 0), () and (1,), first, in the middle and last in a unit; their moments, too."""
    found = agreed(facts)
    shapes = {"none": [0], "flat": [8, 0], "scalar": [], "one": [1], "weight": [8, 8]}
    units = {1: "none flat scalar one weight", 3: "one none weight flat scalar", 5: "scalar weight one flat none"}
    wanted = {f"layers.{i}.{name}": shapes[name] for i, names in units.items() for name in names.split()}
    ends = {"layers.0.weight": [8, 6], "layers.0.bias": [8], "layers.6.weight": [5, 8], "layers.6.bias": [5]}
    for stage in STAGES:
        assert found.pop(stage) == {name: [shape] * 3 for name, shape in {**wanted, **ends}.items()}, stage
    assert found == truth(3 * 5 + 4, 2 * (3 * 5 + 4))


@case(5, 7)
def test_prime_sizes_and_fewer_elements_than_ranks_train_right(facts: list[Facts], n: int) -> None:
    """Shapes: units of 1, 2, 3, 77 and 143 elements, and modules without any, which are no units."""
    found = agreed(facts)
    sizes = {"one": 1, "two": 2, "three": 3, "first": 7 * 11, "second": 11 * 13, "last": 14 * 5}
    chunks = {name: -(-size // n) for name, size in sizes.items()}  # rounded up
    assert found.pop("units") == {name: [sizes[name], n * chunk, chunk] for name, chunk in chunks.items()}
    assert found == truth(8, 8)


@case(4, 5)
def test_collectives_on_half_of_the_ranks_give_that_halfs_sums(facts: list[Facts], n: int) -> None:
    """Shapes: rank r has (r + 1) times (1, 2, 3, ...)."""
    for rank, found in enumerate(facts):
        half = list(range(rank % 2, n, 2))
        places = range(1, 3 * len(half) + 1)
        total, mine = sum(r + 1 for r in half), 3 * half.index(rank)
        summed = [total * i for i in places]
        assert found == {
            "all_reduce": summed,
            "reduce_scatter": summed[mine : mine + 3],
            "all_gather": [(half[(i - 1) // 3] + 1) * i for i in places],
            "broadcast": [(half[0] + 1) * i for i in places],
            "everyone": [n * (n + 1) // 2 * i for i in range(1, n + 1)],
            "a half made by MPI": summed,
        }, rank


@case(5, 7)
def test_a_unit_without_elements_takes_part_like_any_other(facts: list[Facts], n: int) -> None:
    """Shapes, a relative: and a unit that is one number; with clipping, decay and two micro-batches."""
    found = agreed(facts)
    norms = found.pop("norms")
    assert all(norms[stage] == norms["truth"] for stage in STAGES) and min(norms["truth"]) > 0.1
    sizes = {"layers.0": 49, "layers.1": 0, "layers.2": 1, "layers.3": 40}
    assert found.pop("units") == {name: [size, -(-size // n) * n] for name, size in sizes.items()}
    assert found == truth(2 + 2 + 1 + 2, 2 * (2 + 2 + 1 + 2))


@case(3)
def test_a_model_with_nothing_to_train_is_refused(facts: list[Facts]) -> None:
    """Shapes, a relative: in a sentence, alike on all ranks, without waiting for anyone."""
    found = agreed(facts)
    assert len(found) == 4 * 3
    for refused in found.values():
        assert refused == [
            "backward: this tensor does not depend on anything that requires a gradient",
            "step: there are no gradients: call backward first",
        ]


@case(4, 5)
def test_halves_with_their_ranks_reversed_train_as_they_would_alone(facts: list[Facts], n: int) -> None:
    """Shapes, a relative"""
    for rank, found in enumerate(facts):
        half = list(range(rank % 2, n, 2))[::-1]
        assert found == {**truth(6, 6), "rank": half.index(rank), "size": len(half)}, rank


# Who is who


@case(3, 5)
def test_a_layer_that_rank_0_skips_has_zeros_from_it(facts: list[Facts]) -> None:
    """Who is who: under DP, ZeRO-1 and ZeRO-2."""
    four, one = agreed(facts), truth(9, 9, stages=3)
    assert four == {**one, "compared": 4 * one["compared"]}


def all_raised(facts: list[Facts], *pairs: tuple[str, str]) -> None:
    """Every rank in each way: an error that says what two neighbours did, soon, before any weight changed."""
    for found in facts:
        assert len(found["ways"]) == len(pairs)
        for way, words in zip(found["ways"], pairs, strict=True):
            for word in (*words, "every rank must call the same collectives in the same order"):
                assert word in way["error"], f"{word!r} is not in: {way['error']}"
            assert not way["changed"] and way["fast"], way


@case(3, 5)
def test_a_layer_that_rank_0_skips_under_zero3_is_an_error_on_every_rank(facts: list[Facts]) -> None:
    """Who is who: also where the skipped layer has the size of the next one, and all that MPI sees is equal."""
    all_raised(
        facts,
        ("all_gather of layers.0", "all_gather of layers.1"),
        ("all_gather of layers.1", "all_gather of layers.2"),
        ("all_gather of layers.2", "all_gather of last"),
        ("all_gather of layers.0", "all_gather of last"),
    )


@case(3)
def test_what_was_taken_from_the_model_before_wrapping_is_what_is_trained(facts: list[Facts]) -> None:
    """Who is who: parameters, layers and views do not go stale."""
    found = agreed(facts)
    names = [text.split(" is not gathered here")[0] for text in found.pop("not here")]
    assert names == ["parameter layers.0.weight", "parameter layers.1.weight"]
    assert found == {"compared": 4 * 6, "unlike": [], "view": True}


@case(3, 5)
def test_ranks_with_seeds_of_their_own_train_from_those_of_rank_0(facts: list[Facts], n: int) -> None:
    """Who is who"""
    assert len({found.pop("own") for found in facts}) == n, "ranks have drawn alike"
    assert agreed(facts) == {"drawn": truth(6, 0, steps=1), "to_be_drawn": truth(6, 0, steps=1)}


@case(3)
def test_a_frozen_layer_between_trained_ones_has_no_moments_no_gradients_and_no_decay(facts: list[Facts]) -> None:
    """Who is who: nor has a frozen weight beside a trained bias."""
    found = agreed(facts)
    fixed = ["b.weight", "b.bias", "c.layers.0.weight"]
    here = {
        "frozen": ["b (frozen)", "c (frozen)"],
        "held": 0,
        "state of": ["a.bias", "a.weight", "c.layers.0.bias", "c.layers.1.bias", "c.layers.1.weight"],
        "unchanged": fixed,
    }
    assert found == {**truth(8, 2 * 5), "still": fixed, **dict.fromkeys(STAGES, here)}


@case(3, 5)
def test_layers_that_rank_0_detaches_repeats_or_swaps_have_from_it_what_it_found(facts: list[Facts]) -> None:
    """Who is who, a relative: under DP, ZeRO-1 and ZeRO-2."""
    four, one = agreed(facts), truth(9, 9, stages=3)
    assert four == {**one, "compared": 4 * one["compared"]}


@case(3, 5)
def test_layers_that_rank_0_detaches_repeats_or_swaps_are_an_error_under_zero3(facts: list[Facts]) -> None:
    """Who is who, a relative: on every rank."""
    all_raised(
        facts,
        ("all_gather of layers.0", "reduce_scatter of layers.0"),
        ("all_gather of layers.2", "reduce_scatter of layers.2"),
        ("all_gather of layers.1", "all_gather of layers.2"),
        ("all_gather of layers.1", "all_gather of layers.2"),
    )


@case(3)
def test_values_that_only_rank_0_has_arrive_bit_for_bit(facts: list[Facts]) -> None:
    """Who is who, a relative"""
    assert agreed(facts) == {"unlike": []}


@case(3)
def test_everything_frozen_but_one_bias_trains_that_bias_alone(facts: list[Facts]) -> None:
    """Who is who, a relative"""
    fixed = ["a.weight", "a.bias", "b.weight", "c.weight", "c.bias"]
    names = sorted([*fixed, "b.bias", "b.bias:momentum_buffer"])
    assert agreed(facts) == {**truth(6, 1), "still": fixed, "state of": ["b.bias"], "names": names}
