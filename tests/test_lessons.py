"""The lesson programs: what they show is measured, what they claim is computed, and a wrong claim fails.

A run's report is fetched once and serves several tests.
"""

import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch import BIN, OPEN_MPI, ROOT, python_path, run_python, run_ranks

LESSONS = {name[:2]: f"lessons/{name}.py" for name in ("01_data_parallel", "02_zero1", "03_zero2", "04_zero3")}
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
FORMULAS = {"DP": (2, 0), "ZeRO-1": (2, 1), "ZeRO-2": (1, 1), "ZeRO-3": (3, 0)}  # per backward, per step
SAME = "same bits as plain DP"
PLANTED = "tests/jobs/planted_lesson.py"
OUT_OF_MEMORY = "lessons/05_out_of_memory.py"
WRONG_DIAGNOSIS = """
import runpy, sys
from dataclasses import replace
from minizero import memory

right = memory.diagnose
memory.diagnose = lambda error: replace(right(error), illness="activations", stage="DP", micro_batches=4)
sys.argv = ["05_out_of_memory.py", "--case", "A"]
runpy.run_path(%r, run_name="__main__")
"""
LESSONS_PATH = {"PYTHONPATH": python_path(ROOT / "lessons")}
MY_OWN = """
import sys
import common, minizero as mz
from importlib import import_module
from minizero import ring

class Broadcasting(mz.Zero1):
    def publish(self, unit):
        ring.all_gather(self.comm, unit.weights)
        ring.broadcast(self.comm, unit.weights)  # needless

task, comm = common.Task(""), mz.Communicator()
report = common.Report("my_own.py", task, comm)
import_module("02_zero1").train(Broadcasting, task, comm, report)
report.memory()
report.traffic()
"""


@cache
def report(lesson: str, ranks: int, *options: str) -> dict[str, Any]:
    """What `--json` prints. Other ranks' output, or anything else, would make it no JSON."""
    done = run_ranks(ranks, LESSONS[lesson], "--json", *options)
    return json.loads(done.stdout)


def shown(lesson: str) -> tuple[str, ...]:
    """The stages that a lesson's tables show."""
    return STAGES[: int(lesson)]


EIGHT = {"01": ("--steps", "16"), "02": ("--steps", "4"), "03": (), "04": ("--steps", "4")}
THREE = {
    "01": ("--steps", "3", "--dtype", "float32"),
    "02": ("--steps", "3", "--batch", "2", "--width", "37"),  # one rank has nothing to do; much padding
    "03": ("--steps", "3", "--micro-batches", "2", "--batch", "100"),
    "04": ("--steps", "3", "--model", "gpt", "--batch", "7", "--layers", "1"),
}


@pytest.mark.parametrize("lesson", LESSONS)
def test_at_8_ranks_the_measured_bytes_per_parameter_are_12_and_5_and_3_and_a_quarter_and_1_and_a_half(
    lesson: str,
) -> None:
    facts = report(lesson, 8, *EIGHT[lesson])
    elements = facts["parameters"] + facts["padding"]
    assert facts["parameters"] == 64 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 10 + 10
    assert facts["padding"] == 6  # of the last layer's 1,290 parameters
    wanted = dict(zip(STAGES, (12, 5, 3.25, 1.5), strict=True))
    for stage in shown(lesson):
        memory = facts["runs"][stage]["memory"]
        assert memory["measured"] == memory["predicted"] == wanted[stage], stage
        assert sum(memory["bytes"].values()) == wanted[stage] * elements, stage
    assert tuple(name for name, run in facts["runs"].items() if "memory" in run) == shown(lesson)


@pytest.mark.parametrize("lesson", LESSONS)
def test_at_8_ranks_the_measured_traffic_is_2_and_3_and_2_and_3(lesson: str) -> None:
    facts = report(lesson, 8, *EIGHT[lesson])
    assert facts["psi"] == 2 * (facts["parameters"] + facts["padding"])
    for stage, wanted in zip(shown(lesson), (2, 3, 2, 3), strict=False):
        traffic = facts["runs"][stage]["traffic"]
        assert traffic["measured"] == traffic["formula"] == wanted, stage
        assert traffic["bytes"] * 8 == wanted * 7 * facts["psi"], stage


@pytest.mark.parametrize("lesson", ["02", "03", "04"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_every_stage_has_the_same_bits_as_plain_dp(lesson: str, ranks: int) -> None:
    facts = report(lesson, ranks, *(EIGHT if ranks == 8 else THREE)[lesson])
    verdict = facts["verdicts"][SAME]
    assert verdict["holds"] and all(stage in verdict["why"] for stage in shown(lesson)[1:])
    losses = [facts["runs"][stage]["loss"] for stage in shown(lesson)]
    assert losses.count(losses[0]) == len(losses) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("lesson", LESSONS)
def test_at_3_ranks_memory_and_traffic_follow_the_formulas_for_other_options(lesson: str) -> None:
    facts = report(lesson, 3, *THREE[lesson])
    b, k = (4 if lesson == "01" else 2), (2 if lesson == "03" else 1)
    elements = facts["parameters"] + facts["padding"]
    assert elements % 3 == 0 and facts["psi"] == b * elements
    for stage in shown(lesson):
        sharded = {"DP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}[stage]
        held = facts["runs"][stage]["memory"]["bytes"]
        each = {"optimizer": 8, "gradients": b, "weights": b}
        assert held == {t: n * elements // (3 if i < sharded else 1) for i, (t, n) in enumerate(each.items())}, stage
        backward, step = FORMULAS[stage]
        assert facts["runs"][stage]["traffic"]["bytes"] * 3 == (backward * k + step) * 2 * facts["psi"], stage


def test_the_default_recipe_reads_95_percent_of_the_test_digits() -> None:
    facts = report("03", 8)
    assert facts["options"]["dtype"] == "bfloat16"
    for stage in shown("03"):
        assert facts["runs"][stage]["accuracy"] >= 0.95


def test_alone_on_one_rank_a_lesson_runs_without_mpirun_and_sends_nothing() -> None:
    facts = json.loads(run_python(LESSONS["03"], "--json", "--steps", "3").stdout)
    assert facts["ranks"] == 1 and facts["padding"] == 0 and facts["verdicts"][SAME]["holds"]
    for stage in shown("03"):
        run = facts["runs"][stage]
        assert run["memory"]["measured"] == 12 and run["traffic"]["bytes"] == 0


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_transfer_table_is_what_the_ring_really_sent(ranks: int) -> None:
    ring = report("01", ranks, *(EIGHT if ranks == 8 else THREE)["01"])["ring"]
    for rank, sent in enumerate(ring):
        reduce_scatter = [
            [(rank - 1 - step) % ranks, sorted((rank - j) % ranks for j in range(step + 1))]
            for step in range(ranks - 1)
        ]
        all_gather = [[(rank - step) % ranks, list(range(ranks))] for step in range(ranks - 1)]
        assert sent == reduce_scatter + all_gather, rank


def test_replicas_have_one_hash_and_with_gradients_never_reduced_all_differ_though_the_loss_falls() -> None:
    facts = report("01", 8, *EIGHT["01"])
    assert len(facts["hashes"]) == 8 and len(set(facts["hashes"])) == 1 and facts["redundant"] == 7 / 8
    assert len(set(facts["unreduced"]["hashes"])) == 8 and facts["hashes"][0] not in facts["unreduced"]["hashes"]
    assert facts["unreduced"]["loss"][-1] < 0.8 * facts["unreduced"]["loss"][0]
    assert facts["slices"] == [f"rows {60 * rank} to {60 * rank + 59}" for rank in range(8)]
    assert facts["verdicts"]["same bits on every rank"]["holds"]


def test_each_rank_keeps_moments_for_its_own_chunk_only() -> None:
    owners = report("02", 8, *EIGHT["02"])["owners"]["layers.0"]
    assert [start for start, _, _ in owners] == list(range(0, 8320, 1040))
    assert all(moments == {"exp_avg": stop - start, "exp_avg_sq": stop - start} for start, stop, moments in owners)


def test_under_zero2_one_whole_gradient_exists_at_a_time() -> None:
    assert report("03", 8)["whole_gradients"] == {"DP": 4, "ZeRO-2": 1, "units": 4}


def test_zero3s_temporary_memory_is_the_same_with_4_layers_and_with_16() -> None:
    few, many = (report("04", 8, *EIGHT["04"])["temporary"][layers] for layers in ("4", "16"))
    assert few.pop("model") == 85_280 and many.pop("model") == 481_568
    assert few == many == {"units": 1, "weights": 2 * 16_512, "gradients": 2 * 16_512}


def test_a_parameter_costs_12_bytes_and_small_steps_need_a_master_copy() -> None:
    facts = json.loads(run_python("lessons/00_autograd.py", "--json", "--steps", "2").stdout)
    bill = facts["bytes_per_parameter"]
    assert bill == {"weights": 2, "gradients": 2, "optimizer, exp_avg": 4, "optimizer, exp_avg_sq": 4, "total": 12}
    assert facts["small_steps"]["sum"] == facts["small_steps"]["weight"]["False"] == 1
    assert facts["small_steps"]["weight"]["True"] == pytest.approx(0.99, abs=0.002)
    assert facts["graph"]["order"] == ["mul", "relu", "add", "mul"]
    assert facts["graph"]["gradients"] == [-2, 4, 2]
    assert 0 < facts["gradient_error"] < 1e-8


def test_lesson_00_says_the_same_under_mpirun_as_alone() -> None:
    alone = run_python("lessons/00_autograd.py").stdout
    accuracy = float(alone.split("accuracy")[1].split("%")[0])
    assert accuracy >= 95 and "1.0 + 0.001 = 1.0" in alone
    assert run_ranks(3, "lessons/00_autograd.py").stdout == alone


def test_the_printed_loss_is_the_mean_over_all_micro_batches() -> None:
    one, three = (report("02", 3, "--steps", "2", "--micro-batches", k)["runs"]["DP"]["loss"] for k in ("1", "3"))
    assert three[0] == pytest.approx(one[0], rel=1e-5)
    assert report("02", 3, "--steps", "2", "--batch", "2", "--micro-batches", "2")["runs"]["DP"]["loss"][0] > 1


@cache
def out_of_memory(ranks: int, *options: str) -> dict[str, Any]:
    """What lesson 05 prints with `--json`."""
    return json.loads(run_ranks(ranks, OUT_OF_MEMORY, "--json", *options).stdout)


def test_each_case_of_lesson_05_fails_where_it_should_of_its_illness_and_is_cured() -> None:
    facts = out_of_memory(8)
    assert {letter: run["illness"] for letter, run in facts["runs"].items()} == {
        "A": "redundant state", "B": "one unit", "C": "one unit", "D": "weights as a whole", "E": "activations",
        "F": "redundant state",
    }  # fmt: skip
    ends = {letter: [run["tried"][stage].split(",")[0] for stage in STAGES] for letter, run in facts["runs"].items()}
    building, forward, second, trains = (
        "out of memory: building", "out of memory: forward of step 1", "out of memory: forward of step 2", "trains",
    )  # fmt: skip
    assert ends == {
        "A": ["out of memory: update of step 1", trains, trains, trains],
        "B": [forward] * 4,
        "C": [building] * 3 + [forward],
        "D": [building] * 3 + [trains],
        "E": [forward] * 3 + [second],
        "F": [second, trains, trains, trains],
    }
    cures = {letter: run["cure"].split(",")[0].split(":")[0].split(" per")[0] for letter, run in facts["runs"].items()}
    assert cures == {"A": "ZeRO-1", "B": "smaller units", "C": "tensor parallelism", "D": "ZeRO-3",
                     "E": "each batch in 4 parts", "F": "ZeRO-1"}  # fmt: skip
    assert all(run["after"].startswith("trains, peak ") for run in facts["runs"].values())
    assert facts["verdicts"] == {
        "every cure cures": {"holds": True, "why": "6 of 6"},
        "each case shows the illness it was built for": {"holds": True, "why": "6 of 6"},
    }


def test_lesson_05s_peak_is_one_phases_not_the_sum_and_is_predicted() -> None:
    measured, predicted = (out_of_memory(8)["phases"][which] for which in ("measured", "predicted"))
    assert list(measured) == list(predicted) == ["forward", "backward", "step"]
    totals = {phase: sum(terms.values()) for phase, terms in measured.items()}
    for phase, total in totals.items():
        known = total - measured[phase]["other"]
        assert sum(predicted[phase].values()) == pytest.approx(known, rel=0.05), phase
        assert measured[phase]["optimizer"] == 1_006_096 and measured[phase]["weights"] == 2 * 1_006_096
    assert sum(predicted["forward"].values()) == totals["forward"] - measured["forward"]["other"]
    assert measured["forward"]["gradients"] == 0
    assert measured["forward"]["activations"] == (16 * 256 + 64) * 180 * 4
    assert measured["step"]["gradients"] == 2 * 1_006_096 and measured["step"]["activations"] <= 4
    sum_of_the_highest = sum(max(terms[term] for terms in measured.values()) for term in measured["step"])
    assert sum_of_the_highest > 1.3 * max(totals.values())


def test_on_5_ranks_lesson_05_cures_what_it_can_and_says_how_many_ranks_the_rest_needs() -> None:
    done = run_ranks(5, OUT_OF_MEMORY, "--case", "D", "--case", "E")
    assert done.stderr == "" and done.stdout.count("machine: 1 node") == 1
    assert max(map(len, done.stdout.splitlines())) <= 100
    first, second = done.stdout.split("Case E")
    assert "Cure: more ranks: ZeRO-3 on 8 fits." in first and "After the cure: to be tried on 8 ranks" in first
    assert "Illness: activations." in second and "Cure: each batch in 8 parts" in second
    assert "After the cure: trains, peak " in second and "every cure cures: yes (1 of 1)" in second


def test_alone_and_with_enough_memory_lesson_05_has_nothing_to_cure() -> None:
    alone = run_python(OUT_OF_MEMORY, "--case", "A").stdout
    assert "Illness: too many parameters. Even 1/1 of everything" in alone and "every cure" not in alone
    ample = json.loads(run_ranks(2, OUT_OF_MEMORY, "--json", "--case", "A", "--budget", "13 MB").stdout)
    assert ample["runs"] == {} and ample["verdicts"] == {}


def test_a_wrong_diagnosis_makes_both_verdicts_of_lesson_05_no(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_DIAGNOSIS % str(ROOT / OUT_OF_MEMORY))
    done = run_ranks(8, script, env=LESSONS_PATH, check=False)
    assert done.returncode and "After the cure: out of memory: update of step 1" in done.stdout
    assert "every cure cures: no (0 of 1)" in done.stdout
    assert "each case shows the illness it was built for: no (0 of 1)" in done.stdout


def test_a_stage_of_ones_own_has_no_prediction_and_its_columns_add_up(tmp_path: Path) -> None:
    script = tmp_path / "my_own.py"
    script.write_text(MY_OWN)
    done = run_ranks(3, script, "--steps", "2", env=LESSONS_PATH)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("Broadcasting ")]
    assert rows[1][5:7] == ["6.67", "-"]
    assert rows[2][1:8] == ["2.00", "0.00", "1.00", "2.00", "│", "5.00", "-"]


def test_a_rank_that_does_not_come_to_a_report_is_missed(tmp_path: Path) -> None:
    script = tmp_path / "my_own.py"
    script.write_text(MY_OWN.replace("report.memory()", "comm.rank == 1 and sys.exit()\nreport.from_all(0)"))
    done = run_ranks(3, script, "--steps", "2", env=LESSONS_PATH, check=False)
    assert done.returncode and "rank 1 has ended its program, but rank 2 waits for it" in done.stderr


def test_a_loss_that_explodes_stays_readable_and_on_one_rank_there_is_no_padding() -> None:
    done = run_python(LESSONS["02"], "--steps", "5", "--lr", "1000").stdout
    losses = done.splitlines()[2].split("loss")[1].split("accuracy")[0].split(" → ")
    assert max(map(float, losses)) > 1e6 and max(map(len, losses)) < 15
    assert "padding" not in done


def test_only_rank_0_prints_and_no_line_is_wider_than_100_columns() -> None:
    for lesson, script in LESSONS.items():
        done = run_ranks(5, script, "--steps", "2")
        assert done.stdout.count("machine: 1 node") == 1 and done.stdout.count("accuracy") == max(int(lesson), 2)
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert done.stderr == ""


def test_a_wrong_gradient_makes_the_verdict_no_names_the_tensor_and_ends_every_rank_with_1() -> None:
    done = run_ranks(3, PLANTED, "unreduced", LESSONS["03"], "--steps", "3", check=False)
    assert done.returncode
    assert f"{SAME}: no (ZeRO-2 differs, first in layers.0.weight" in done.stdout
    assert sorted(line for line in done.stderr.splitlines() if "ended" in line) == [
        f"rank {r} ended with 1" for r in range(3)
    ]


def test_one_bit_of_one_moment_on_one_rank_makes_the_verdict_no() -> None:
    done = run_ranks(5, PLANTED, "one_bit", LESSONS["04"], "--steps", "2", check=False)
    assert done.returncode
    assert f"{SAME}: no (ZeRO-2 differs, first in layers.3.bias (exp_avg_sq), on rank 4)" in done.stdout


def test_whole_gradients_kept_by_zero2_show_in_the_tables() -> None:
    facts = json.loads(run_ranks(8, PLANTED, "whole_gradients", LESSONS["03"], "--steps", "2", "--json").stdout)
    run = facts["runs"]["ZeRO-2"]
    assert (run["memory"]["measured"], run["memory"]["predicted"]) == (5, 3.25)
    assert (run["traffic"]["measured"], run["traffic"]["formula"]) == (3, 2)
    assert facts["verdicts"][SAME]["holds"]  # the bits cannot tell


@pytest.mark.parametrize(
    "options, complaint",
    [
        (("--steps", "1"), "argument --steps: 1 does not lie in 2 to 1,000,000"),
        (("--batch", "many"), "argument --batch: invalid whole number value: 'many'"),
        (("--lr", "nan"), "argument --lr: nan does not lie in"),
        (("--stages", "2"), "unrecognized arguments: --stages 2"),
    ],
)
def test_a_bad_option_is_one_line_from_rank_0(options: tuple[str, ...], complaint: str) -> None:
    done = run_ranks(3, LESSONS["03"], *options, check=False)
    assert done.returncode and not done.stdout
    lines = [line for line in done.stderr.splitlines() if "03_zero2.py" in line]
    assert len(lines) == 1 and complaint in lines[0] and "Traceback" not in done.stderr


def on_a_terminal(*command: str, env: dict[str, str] | None = None) -> str:
    """What a command prints if its stdout is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, **OPEN_MPI, "PYTHONPATH": python_path(), "TERM": "xterm", **(env or {})}
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)
    job = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=theirs)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65_536):
            text += part
    except OSError:  # Linux: everybody has closed the other end
        pass
    os.close(ours)
    assert job.wait(60) == 0, text.decode()
    return text.decode()


def test_on_a_terminal_there_is_a_bar_and_without_rich_a_line(tmp_path: Path) -> None:
    assert importlib.util.find_spec("rich")
    lesson = (sys.executable, "lessons/00_autograd.py", "--steps", "2")
    assert "━" in on_a_terminal(*lesson)
    if sys.platform == "linux":  # elsewhere a rank cannot tell where mpirun's output goes
        mpiexec = shutil.which("mpiexec", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
        assert mpiexec
        assert "━" in on_a_terminal(mpiexec, "-n", "2", sys.executable, LESSONS["02"], "--steps", "2")
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')\n")
    plain = on_a_terminal(*lesson, env={"PYTHONPATH": python_path(tmp_path)})
    assert "━" not in plain and "\x1b" not in plain and "Adam      loss 2.3" in plain


def test_a_lesson_runs_from_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "lessons/00_autograd.py"), "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True)
    assert done.returncode == 0, done.stderr
