"""Tensor and pipeline parallelism are axes; ZeRO lives on the data-parallel group, and changes no bit there either."""

import json
import re
import time
from typing import Any

import pytest

from launch import ROOT, run_python, run_ranks
from minizero import nn, plan
from minizero.mesh import refusal
from minizero.pipeline import Do, Order, gpipe, one_f_one_b, timeline

JOBS = ROOT / "tests" / "jobs"
ORDERS = pytest.mark.parametrize("order", [gpipe, one_f_one_b])
SHAPES = [(p, k) for p in (1, 2, 3, 4, 8) for k in (1, 2, 3, 4, 7, 16)]


def test_on_every_mesh_all_stages_have_dps_bits_and_come_to_the_truth() -> None:
    """38 meshes of 1 to 8 ranks: bits, float64 truth, bytes held and sent, live micro-batches, refusals."""
    found = json.loads(run_ranks(8, JOBS / "mesh_sweep.py", timeout=400).stdout)
    worst = found.pop("worst")
    assert found["meshes"] == 38
    ranks = range(1, 9)
    meshes = [(dp, pp, tp) for dp in ranks for pp in ranks for tp in ranks if dp * pp * tp <= 8]
    assert len(meshes) == 38 and found["trained"] == sum(
        dp * pp * tp * ((4 % tp == 0) + (24 % tp == 0)) for dp, pp, tp in meshes
    )
    assert found["memory"] == 4 * found["trained"]
    assert 0 < worst["SGD"] < 1e-12 and 0 < worst["Adam, eps 1e-4"] < 1e-12 and 0 < worst["Adam"] < 1e-8
    assert worst["norm"] < 1e-12


def test_the_parts_of_a_mesh_each_do_what_they_say() -> None:
    """Conjugate operations by finite differences, slices, dropout, bad numbers, refusals, messages, saving, traffic."""
    assert run_ranks(8, JOBS / "mesh_parts.py", timeout=200).stdout == "14 done\n"


REDS: dict[str, str] = {
    "none": "",
    "the norm counts what all tp ranks hold tp times": "norm truth",
    "the norm is that of the own part of the model": "norm replicas truth",
    "no all-reduce in the backward of the entrance": "norm replicas truth",
    "only one layer's entrance has no all-reduce": "norm replicas truth",
    "no all-reduce after a row-parallel layer": "norm replicas truth",
    "the gradient is added up over tp ranks behind a row-parallel layer, too": "norm truth",
    "a row-parallel layer adds its bias on every rank": "norm truth",
    "all tp ranks draw the same slice": "norm truth",
    "slices are drawn by their own shapes": "norm truth",
    "the dp group is taken for the world": "refused",
    "the tp group is taken for the dp group": "refused",
    "every rank of the mesh has dropout of its own": "norm replicas truth",
    "each stage begins dropout's numbers anew": "norm truth",
    "dropout's micro-batch is the number of backwards so far": "bits norm truth",
    "an inner stage forgets to wait for its gradient": "norm truth",
    "an inner stage weighs by the examples once more": "norm truth",
    "GPipe runs the backwards from the last to the first": "bits",
    "1F1B in name only: all forwards first": "live",
    "what a backward has used is kept": "live",
    "the last stage leaves out its last function": "norm truth",
}


def test_planted_faults_turn_the_right_verdicts_red() -> None:
    lines = [json.loads(line) for line in run_ranks(8, JOBS / "mesh_faults.py", timeout=200).stdout.splitlines()]
    assert {line["fault"]: " ".join(line["red"]) for line in lines} == REDS


@pytest.mark.parametrize(
    ("how", "who", "sizes"),
    [("exit", 1, (1, 2, 1)), ("exit", 0, (1, 2, 1)), ("exit", 5, (2, 2, 2)), ("exit", 2, (1, 3, 1)),
     ("raises", 0, (1, 3, 1)),
     ("killed", 1, (1, 1, 2))],
)  # fmt: skip
def test_a_rank_of_a_mesh_that_leaves_ends_the_job(how: str, who: int, sizes: tuple[int, int, int]) -> None:
    dp, pp, tp = sizes
    done = run_ranks(dp * pp * tp, JOBS / "mesh_leave.py", how, who, *sizes, check=False, timeout=60)
    left = re.search(r"leaving at ([\d.]+)", done.stdout)
    assert left and done.returncode, f"{done.stdout}{done.stderr}"
    assert time.time() - float(left[1]) < 10, done.stderr
    if how == "exit":
        assert f"rank {who} has ended its program, but rank " in done.stderr, done.stderr
    if (how, sizes) == ("exit", (1, 2, 1)):
        what = "control of forward" if who == 0 else "pipeline of backward"
        assert f"rank {1 - who} waits for it in {what} of micro-batch 1" in done.stderr, done.stderr
    if how == "raises":
        assert f"[rank {who}/{dp * pp * tp}] KeyError: 'the reason'" in done.stderr, done.stderr


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_the_largest_moment_of_each_phase_on_a_mesh_is_the_plans(sizes: tuple[int, int, int]) -> None:
    found = json.loads(run_ranks(4, JOBS / "mesh_peaks.py", *sizes).stdout)
    assert len(found) == 4 * 2 * 3
    for stage, pipeline_stage, phase, measured, predicted in found:
        where = f"{stage}, stage {pipeline_stage} of the pipeline, {phase}"
        known = sum(measured.values()) - measured["other"]
        assert sum(predicted.values()) == pytest.approx(known, rel=0.04), where
        for term in ("weights", "gradients", "optimizer"):
            assert measured[term] == predicted[term], f"{where}: {term}"
        if phase == "forward":
            assert measured["activations"] == pytest.approx(predicted["activations"], rel=0.01), where


# Without ranks: schedules, and which sizes fit.


@ORDERS
@pytest.mark.parametrize(("stages", "k"), SHAPES)
def test_every_stage_runs_each_micro_batch_forward_and_then_backward_once(order: Order, stages: int, k: int) -> None:
    for stage in range(stages):
        todo = order(stage, stages, k)
        assert sorted(todo) == sorted(Do(what, i) for what in "FB" for i in range(k))
        assert all(todo.index(Do("F", i)) < todo.index(Do("B", i)) for i in range(k))
        for what in "FB":  # in the same order everywhere: messages to a neighbour meet it waiting for them
            assert [do.micro_batch for do in todo if do.what == what] == list(range(k))


@ORDERS
@pytest.mark.parametrize(("stages", "k"), SHAPES)
def test_no_stage_waits_for_ever_and_all_together_wait_no_longer_than_the_ramp(
    order: Order, stages: int, k: int
) -> None:
    turns = timeline(order, stages, k)
    assert {len(turn) for turn in turns} == {2 * (k + stages - 1)}
    at = {(stage, do): turn for stage, row in enumerate(turns) for turn, do in enumerate(row) if do}
    assert len(at) == 2 * k * stages
    for (stage, do), turn in at.items():
        before = at.get((stage + (1 if do.what == "B" else -1), do))
        assert before is None or before < turn
        assert do.what == "F" or at[stage, Do("F", do.micro_batch)] < turn


@pytest.mark.parametrize(("stages", "k"), SHAPES)
def test_under_1f1b_stage_i_of_p_holds_p_minus_i_micro_batches_and_under_gpipe_all(stages: int, k: int) -> None:
    def most(todo: list[Do]) -> int:
        live = [sum(1 if do.what == "F" else -1 for do in todo[:n]) for n in range(len(todo) + 1)]
        return max(live)

    for stage in range(stages):
        assert most(one_f_one_b(stage, stages, k)) == min(stages - stage, k)
        assert most(gpipe(stage, stages, k)) == k


def test_a_schedule_prints_and_one_that_cannot_end_is_named() -> None:
    rows = [" ".join(str(do or "·") for do in row) for row in timeline(one_f_one_b, 2, 4)]
    assert rows == ["F0 F1 · B0 F2 B1 F3 B2 · B3", "· F0 B0 F1 B1 F2 B2 F3 B3 ·"]

    def knotted(stage: int, stages: int, k: int) -> list[Do]:
        return gpipe(stage, stages, k) if stage else [Do("F", 0), Do("B", 0), Do("F", 1), Do("B", 1)]

    with pytest.raises(ValueError, match="for ever these wait: B0 of stage 0, F1 of stage 1"):
        timeline(knotted, 2, 2)


def test_sizes_that_do_not_fit_are_refused_with_those_that_would() -> None:
    text = refusal(8, 2, 2, 3)
    assert text.startswith("a mesh of dp 2 × pp 2 × tp 3 needs 12 ranks, and there are 8. These would fit: 2×2×2, ")
    assert len(text.split("fit: ")[1].split(", ")) == 10
    assert refusal(1, 2, 1, 1).endswith("fit: 1×1×1")
    assert refusal(4096, 7, 1, 1).endswith(", and 81 more")


@pytest.mark.parametrize("tied", [False, True])
def test_slices_and_stages_add_up_to_the_whole_model(tied: bool) -> None:
    """By arithmetic: what a rank of a mesh holds, from reading the layers, against the layers themselves."""
    shape: dict[str, Any] = {"vocab": 11, "context": 5, "width": 8, "heads": 4, "layers": 4, "tied": tied}
    whole = plan.gpt(**shape, batch=2)
    model = nn.GPT(**shape)
    assert whole.parameters == sum(parameter.size for parameter in model.parameters())
    kept = sum(p.size for name, p in model.named_parameters() if is_replicated(name))
    for tp in (1, 2, 4):
        sliced = plan.gpt(**shape, batch=2, tp=tp)
        assert (sliced.parameters - kept) * tp + kept == whole.parameters
        for pp in (1,) if tied else (1, 2, 3, 4):
            stages = [sliced.stage(p, pp) for p in range(pp)]
            assert sum(stage.parameters for stage in stages) == sliced.parameters
            names = [unit.name for stage in stages for unit in stage.units]
            assert names == [unit.name for unit in whole.units]
    if tied:
        with pytest.raises(ValueError, match="tied=0"):
            whole.stage(0, 2)
    with pytest.raises(ValueError, match="4 pieces cannot be cut in a pipeline of 5"):
        whole.stage(0, 5)
    with pytest.raises(ValueError, match="tp = 3 ranks cannot share 4 attention heads"):
        plan.gpt(**shape, batch=2, tp=3)


def is_replicated(name: str) -> bool:
    cut = ("query", "key", "value", "up", "out.weight", "down.weight")
    return not any(part in name for part in cut)


@pytest.mark.parametrize("layers", range(1, 6))
def test_an_mlps_layers_are_cut_in_pairs_and_the_last_of_an_odd_number_is_whole(layers: int) -> None:
    sizes = [6, *[24] * (layers - 1), 8]
    cut = plan.mlp(sizes, 2, tp=2)
    for i, unit in enumerate(cut.units):
        whole = sizes[i] * sizes[i + 1]
        alone = i == layers - 1 and layers % 2
        assert unit.parameters == (whole // (1 if alone else 2), sizes[i + 1] // (2 if not alone and i % 2 == 0 else 1))


def planned(*arguments: str) -> dict[str, Any]:
    return json.loads(run_python("-m", "minizero", "plan", "--json", *arguments).stdout)


def test_13_billion_parameters_on_2_2_2_are_39_26_22_75_and_19_5_gb() -> None:
    """The degree of sharding is dp = 2, not the number of ranks."""
    found = planned("--params", "13e9", "--dp", "2", "--pp", "2", "--tp", "2")
    assert found["parameters"] == 13e9 / 4 and found["mesh"]["dp"] == 2
    (only,) = found["plans"]
    assert [only["stages"][stage]["total"] for stage in plan.STAGES] == [39e9, 26e9, 22.75e9, 19.5e9]
    assert [only["stages"][stage]["bytes_per_parameter"] for stage in plan.STAGES] == [12, 8, 7, 6]
    text = run_python("-m", "minizero", "plan", "--params", "13e9", "--dp", "2", "--pp", "2", "--tp", "2").stdout
    assert "on a mesh of dp 2 × pp 2 × tp 2 = 8 ranks: 1/4 of the model" in " ".join(text.split())


def test_a_plan_for_a_gpt_on_a_mesh_shows_its_largest_stage_and_the_traffic_by_axis() -> None:
    shape = {"vocab": 1000, "width": 64, "heads": 8, "layers": 8, "batch": 2, "time": 16, "tied": 0}
    gpt = ",".join(f"{key}={value}" for key, value in shape.items())
    found = planned("--gpt", gpt, "--dp", "4", "--pp", "4", "--tp", "2", "--micro-batches", "6")
    block, c, activation = 12 * 64 * 64 + 13 * 64, 64, 4 * 2 * 16 * 64
    sliced = (block - 6 * c) // 2 + 6 * c  # two norms and two biases are not cut
    assert found["parameters"] == (1000 + 16) * c + 2 * sliced and found["mesh"]["units"][0] == "token"
    assert found["mesh"]["live"] == 4
    assert found["mesh"]["sent"] == {"tp": 6 * 2 * 8 * activation // 2, "pp": 6 * 2 * activation}
    (only,) = found["plans"]
    psi = 2 * (found["parameters"] + only["padding"])
    sent = [only["stages"][stage]["sent_per_step"] for stage in plan.STAGES]
    assert sent == [k * psi * 3 // 4 for k in (12, 13, 7, 18)]
    last = planned("--gpt", gpt, "--pp", "2")
    assert last["mesh"]["units"][-1] == "head"  # of two, both with one micro-batch: the norm is there as well
    assert last["mesh"]["sent"] == {"tp": 0, "pp": activation}
    wide = planned("--gpt", gpt, "--pp", "2", "--dtype", "float64")
    assert wide["mesh"]["sent"] == {"tp": 0, "pp": 2 * activation}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--params", "13e9", "--ranks", "8", "--tp", "2"), "--ranks is dp times pp times tp"),
        (("--params", "13e9", "--tp", "0"), "--tp 0: write a whole number of at least 1"),
        (("--params", "13e9", "--micro-batches", "x"), "--micro-batches x: write a whole number"),
        (("--gpt", "vocab=9,width=8,heads=4,layers=2,batch=1,time=4,tied=0", "--pp", "3"), "2 pieces cannot be cut"),
        (("--gpt", "vocab=9,width=8,heads=4,layers=2,batch=1,time=4", "--pp", "2"), "plan with tied=0"),
        (("--gpt", "vocab=9,width=8,heads=4,layers=2,batch=1,time=4", "--tp", "3"), "cannot share 4 attention heads"),
    ],
)
def test_a_plan_for_what_cannot_be_cut_is_one_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    done = run_python("-m", "minizero", "plan", *arguments, check=False)
    assert done.returncode == 2 and complaint in done.stderr and len(done.stderr.splitlines()) == 1
