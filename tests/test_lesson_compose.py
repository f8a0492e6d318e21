"""Lesson 06: what it prints is measured, is what the formulas say, and a fault makes its verdicts no."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch import ROOT, python_path, run_ranks

LESSON = "lessons/06_compose.py"
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
BYTES, SAME = "bytes held and sent on every rank are those of the formulas", "same bits as DP on the same mesh"
PATH = {"PYTHONPATH": python_path(ROOT / "lessons")}
PLANTED = """
import importlib, sys
from minizero import nn, ring, tensor_parallel, zero2

if sys.argv.pop(1) == "entrance":
    tensor_parallel.Split.enter = nn.Whole.enter
else:
    right = zero2.Zero2.reduce
    zero2.Zero2.reduce = lambda engine, unit, gradient: right(engine, unit, gradient * 2)
importlib.import_module("06_compose").main()
"""


@cache
def report(ranks: int, *options: str) -> dict[str, Any]:
    return json.loads(run_ranks(ranks, LESSON, "--json", *options, timeout=300).stdout)


def eight() -> dict[str, Any]:
    return report(8, "--steps", "4")


def test_on_2_2_2_a_rank_holds_12_8_7_and_6_bytes_per_parameter_of_its_quarter() -> None:
    facts = eight()
    assert facts["mesh"] == [2, 2, 2]
    token, position, c = 128 * 64, 32 * 64, 64
    block = (12 * c * c + 3 * c + 4 * c) // 2 + 6 * c  # query, key, value and up have sliced biases
    for stage, elements in (("0", token + position + 2 * block), ("1", 2 * block + 2 * c + token)):
        for name, each in zip(STAGES, (12, 8, 7, 6), strict=True):
            assert sum(facts["memory"][stage][name].values()) == each * elements, (stage, name)
        assert facts["memory"][stage]["ZeRO-2"] == {
            "weights": 2 * elements, "gradients": elements, "optimizer": 4 * elements
        }  # fmt: skip


def test_the_losses_of_the_mesh_are_those_of_eight_replicas_and_all_verdicts_are_yes() -> None:
    facts = eight()
    first = facts["runs"]["8×1×1 DP"]["loss"]
    assert len(facts["runs"]) == 5 and first[-1] < first[0] - 0.3
    for run in facts["runs"].values():
        assert run["loss"] == pytest.approx(first, rel=1e-3)
    assert [facts["runs"][f"2×2×2 {stage}"]["loss"] for stage in STAGES[1:]] == [facts["runs"]["2×2×2 DP"]["loss"]] * 3
    assert len(facts["verdicts"]) == 4 and all(verdict["holds"] for verdict in facts["verdicts"].values())
    assert 1.05 * facts["norm"]["once"] < facts["norm"]["tp times"] < 2**0.5 * facts["norm"]["once"]


def test_each_axis_sends_what_the_text_works_out() -> None:
    facts = eight()
    activations, psi = 16 * 32 * 64 * 4, 121_216
    for name, k in zip(STAGES, (8, 9, 5, 12), strict=True):
        assert facts["traffic"][name] == [8 * activations, activations, k * psi // 2], name


def test_1f1b_keeps_p_minus_i_micro_batches_alive_and_gpipe_all() -> None:
    assert eight()["live"] == {"GPipe": {"0": 4, "1": 4}, "1F1B": {"0": 2, "1": 1}}
    facts = report(4, "--pp", "4", "--steps", "2")
    assert facts["live"] == {"GPipe": dict.fromkeys("0123", 4), "1F1B": {"0": 4, "1": 3, "2": 2, "3": 1}}


def test_reduced_each_time_the_traffic_is_2k_2k_1_k_1_3k_and_reduced_once_2_3_2_2k_1_with_whole_gradients() -> None:
    found = eight()["reductions"]
    assert found == {"DP": [[8, 2], [2, 2]], "ZeRO-1": [[9, 2], [3, 2]], "ZeRO-2": [[5, 1], [2, 2]],
                     "ZeRO-3": [[12, 1], [9, 2]]}  # fmt: skip


def test_only_tensor_parallelism_cures_the_wide_layer_and_zero3_pp_or_tp_the_deep_model() -> None:
    facts = eight()
    wide, deep = facts["a layer too wide"], facts["a model too deep"]
    assert [name for name, way in wide.items() if way["needs"] <= 3.8e6] == ["4×1×2 ZeRO-3", "1×1×8 DP"]
    assert len(wide) == 9 and min(way["needs"] for name, way in wide.items() if "×1 " in name) > 1.4 * 3.8e6
    assert [name for name, way in deep.items() if way["needs"] <= 3.6e6] == [
        "8×1×1 ZeRO-3", "1×8×1 DP, k = 8", "1×1×8 DP"
    ]  # fmt: skip
    psi = 4 * sum(-(-(a * b + b) // 8) * 8 for a, b in [(64, 256), *[(256, 256)] * 15, (256, 10)])
    assert deep["8×1×1 ZeRO-3"]["sent"] == {"tp": 0, "pp": 0, "dp": 3 * psi * 7 // 8}
    assert deep["1×8×1 DP, k = 8"]["sent"] == {"tp": 0, "pp": 2 * 32 * 256 * 4, "dp": 0}


@pytest.mark.parametrize("shape", ["3×1×1", "1×4×1"])
def test_on_other_meshes_the_verdicts_hold_as_well(shape: str) -> None:
    facts = report(3, "--steps", "2") if shape == "3×1×1" else report(4, "--pp", "4", "--steps", "2")
    assert "×".join(map(str, facts["mesh"])) == shape and ("live" in facts) == (shape == "1×4×1")
    assert set(facts["verdicts"]) == {BYTES, SAME} and all(each["holds"] for each in facts["verdicts"].values())
    assert "a layer too wide" not in facts


def test_a_mesh_that_does_not_fit_is_refused_in_one_line() -> None:
    for options, complaint in (
        (("--dp", "3"), "dp 3 × pp 1 × tp 1 needs 3 ranks, and there are 2. These would fit: 2×1×1"),
        (("--pp", "8"), "and there are 2"),
    ):
        done = run_ranks(2, LESSON, *options, check=False)
        lines = [line for line in done.stderr.splitlines() if "06_compose.py" in line]
        assert done.returncode and len(lines) == 1 and complaint in lines[0] and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "verdict", "others"),
    [("entrance", f"{BYTES}: no (DP on rank 0", f"{SAME}: yes"), ("reduce", f"{SAME}: no (ZeRO-2 in", f"{BYTES}: yes")],
)
def test_a_planted_fault_makes_the_right_verdict_no(fault: str, verdict: str, others: str, tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    options = ("--dp", "2", "--tp", "2", "--steps", "2", "--micro-batches", "1")
    done = run_ranks(4, script, fault, *options, env=PATH, check=False)
    assert done.returncode and verdict in done.stdout and others in done.stdout, f"{done.stdout}{done.stderr}"
