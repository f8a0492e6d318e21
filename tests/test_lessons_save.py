"""The lessons' --save and --resume, and Ctrl-C."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import BIN, OPEN_MPI, ROOT, run_ranks

LESSON = "lessons/02_zero1.py"
STAGES = ("DP", "ZeRO-1")


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def report(ranks: int, *options: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(
        run_ranks(ranks, LESSON, "--json", "--width", 16, "--layers", 3, *options).stdout
    )
    assert all(verdict["holds"] for verdict in facts["verdicts"].values())
    return facts


def test_a_lesson_that_goes_on_ends_where_one_without_a_break_does(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    report(3, "--steps", 15, "--micro-batches", 2, "--save", broken)
    assert sorted(p.name for p in (broken / "DP").iterdir()) == ["latest", "step-10", "step-15"]
    resumed = report(3, "--steps", 25, "--micro-batches", 2, "--resume", broken, "--save", broken)
    straight = report(3, "--steps", 25, "--micro-batches", 2, "--save", whole)
    for stage in STAGES:
        assert sorted(p.name for p in (broken / stage).iterdir()) == ["latest", "step-20", "step-25"]
        assert files(broken / stage / "step-25") == files(whole / stage / "step-25") == files(whole / "DP" / "step-25")
        one, other = (facts["runs"][stage] for facts in (resumed, straight))
        assert one["accuracy"] == other["accuracy"] and one["memory"] == other["memory"]
        assert one["traffic"]["bytes"] == other["traffic"]["bytes"] and one["loss"][-1] == other["loss"][-1]
    said = run_ranks(2, LESSON, "--width", 16, "--layers", 3, "--micro-batches", 2, "--steps", 27,
                     "--plot", tmp_path / "p", "--resume", broken / "ZeRO-1" / "step-25").stdout  # fmt: skip
    assert f"Pictures: {tmp_path / 'p-step.png'}" in said  # also of two steps
    for stage in STAGES:  # on another number of ranks, and both from one stage's checkpoint
        assert f"{stage} goes on after 25 steps, from {broken / 'ZeRO-1' / 'step-25'}" in said


def test_what_cannot_go_on_is_one_line_from_rank_0(tmp_path: Path) -> None:
    report(1, "--steps", 12, "--save", tmp_path)
    usual = ("--width", 16, "--layers", 3)
    for options, complaint in (
        (
            (*usual, "--steps", 20, "--batch", 100, "--seed", 3),
            "was saved with --batch 480, --seed 0: go on with the same training",
        ),
        ((*usual, "--steps", 11), "step-10 was saved after 10 steps: --steps must be 12 or more"),
        (("--width", 17, "--layers", 3), "layers.0.weight (BF16 (16, 64), here BF16 (17, 64))"),
    ):
        done = run_ranks(2, LESSON, *options, "--resume", tmp_path, check=False)
        assert done.returncode != 0 and complaint in done.stderr, done
        assert len([line for line in done.stderr.splitlines() if str(tmp_path) in line]) == 1
        assert "Traceback" not in done.stderr
    done = run_ranks(2, LESSON, "--save", tmp_path, check=False)
    assert done.returncode != 0 and f"--save: {tmp_path} has checkpoints: --resume {tmp_path}, or" in done.stderr
    assert sorted(p.name for p in (tmp_path / "DP").iterdir()) == ["latest", "step-10", "step-12"]
    other = tmp_path.with_name(f"{tmp_path.name}-other")
    report(1, "--steps", 12, "--save", other)
    done = run_ranks(2, LESSON, *usual, "--steps", 14, "--resume", other, "--save", tmp_path, check=False)
    assert done.returncode != 0 and f"--save: {tmp_path} has checkpoints: --resume {tmp_path}, or" in done.stderr
    done = run_ranks(2, LESSON, "--save", tmp_path / "DP" / "latest", check=False)
    assert done.returncode != 0 and "--save: " in done.stderr and "Traceback" not in done.stderr
    done = run_ranks(2, LESSON, "--resume", tmp_path / "nothing", check=False)
    assert done.returncode != 0 and f"--resume: there is no checkpoint in {tmp_path / 'nothing'}" in done.stderr


def test_after_a_break_on_other_ranks_all_stages_go_on_from_one_checkpoint_and_have_the_same_bits(
    tmp_path: Path,
) -> None:
    report(3, "--steps", 12, "--save", tmp_path)
    went_on = report(2, "--steps", 24, "--resume", tmp_path, "--save", tmp_path)  # its verdicts are looked at there
    assert len(went_on["runs"]) == 2
    shutil.rmtree(tmp_path / "ZeRO-1")  # as if it had been interrupted before
    assert report(2, "--steps", 30, "--resume", tmp_path)["runs"].keys() == {"DP", "ZeRO-1"}


@pytest.mark.parametrize("ranks", [2, 5])
def test_ctrl_c_ends_all_ranks_within_seconds_with_one_line_and_the_last_save_loads(ranks: int, tmp_path: Path) -> None:
    environment = {**os.environ, **OPEN_MPI, "PATH": os.pathsep.join([BIN, os.environ.get("PATH", os.defpath)])}
    lesson = [LESSON, "--width", "16", "--layers", "3", "--steps", "100000", "--save", str(tmp_path)]
    job = subprocess.Popen(
        ["mpiexec", "-n", str(ranks), sys.executable, *lesson], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "DP" / "step-20").exists() and time.monotonic() < end:
            time.sleep(0.05)
        pressed = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)  # a terminal's Ctrl-C goes to the whole group
        said = job.communicate(timeout=20)[0]
        took = time.monotonic() - pressed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert took < 10 and job.returncode != 0, (took, job.returncode)
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
    assert said.count("interrupted") <= 1, said
    if "MPICH" in said:  # Open MPI's launcher ends the ranks before one can speak
        assert len(re.findall(rf"\[rank \d/{ranks}\] interrupted\n", said)) == 1, said
    last = max(int(p.name[5:]) for p in (tmp_path / "DP").glob("step-*"))
    went_on = report(1, "--steps", last + 2, "--resume", tmp_path / "DP")
    assert len(went_on["runs"]) == 2
