"""The cases about ranks that differ (22-24) and their relatives.

What ends a rank needs a job of its own, each (jobs/cases_ranks_leave.py). All else is claimed by one job per number of
ranks (jobs/cases_ranks.py). test_ranks.py lets ranks leave elsewhere: before they have a communicator, in the middle of
16 MiB, in a half of the ranks.
"""

import re

import pytest

from launch import ROOT, Done, run_ranks, seconds_to_end

JOB = ROOT / "tests" / "jobs" / "cases_ranks.py"
CLAIMS = re.findall(r"^def (\w+(?:_\w+){4,})\(\) -> None:", JOB.read_text(), re.MULTILINE)
WAITS = {  # what the neighbour waits for, where the one that leaves does so before its third step
    "DataParallel": "all_reduce of layers.1",
    "Zero1": "all_reduce of layers.1",
    "Zero2": "reduce_scatter of layers.1",
    "Zero3": "all_gather of layers.0",
}


def let_leave(n: int, how: str, who: int, stage: str) -> Done:
    """Run the job, which must end within 10 s of the leaving."""
    done = run_ranks(n, "tests/jobs/cases_ranks_leave.py", how, who, stage, check=False, timeout=90)
    took = seconds_to_end(done)
    assert took < 10, f"{how}: the job went on for {took:.1f} s: {done.stderr}"
    return done


@pytest.mark.parametrize(
    ("n", "how", "who", "stage"),
    [
        (3, "raises", 1, "DataParallel"), (2, "raises", 0, "Zero3"), (5, "raises", 4, "Zero2"),
        # and relatives: in other threads, event loops and pools; with nowhere to print; unprintable
        (3, "thread", 0, "Zero1"), (2, "pool", 1, "Zero2"), (2, "asyncio", 0, "DataParallel"),
        (3, "stdout closed", 1, "Zero2"), (2, "unspeakable", 1, "Zero1"),
    ],
)  # fmt: skip
def test_a_rank_that_raises_ends_the_job_with_its_traceback(n: int, how: str, who: int, stage: str) -> None:
    done = let_leave(n, how, who, stage)
    assert done.returncode, f"the job ended with code 0: {done.stderr}"
    mine = [line for line in done.stderr.splitlines() if f"[rank {who}/{n}] " in line]
    last = "UnspeakableError: <exception str() failed>" if how == "unspeakable" else "KeyError: 'the reason'"
    assert mine[0].endswith("Traceback (most recent call last):") and mine[-1].endswith(last), done.stderr
    assert any("cases_ranks_leave.py" in line for line in mine), f"the traceback does not say where: {done.stderr}"
    assert "has ended its program" not in done.stderr, f"it was taken for a rank that ended: {done.stderr}"


@pytest.mark.parametrize(
    ("n", "how", "who", "stage"),
    [
        (3, "sys.exit(3)", 1, "Zero2"), (2, "raise SystemExit", 0, "Zero1"), (3, "exit()", 2, "DataParallel"),
        (5, "too early", 3, "Zero3"),
        # and relatives: as if all were well; while an exception is handled; with a library's excepthook
        (2, "sys.exit(0)", 1, "Zero3"), (3, "except", 0, "Zero2"), (2, "finally", 1, "DataParallel"),
        (3, "hook", 1, "Zero1"),
    ],
)  # fmt: skip
def test_a_rank_that_ends_too_early_ends_the_job_with_its_name(n: int, how: str, who: int, stage: str) -> None:
    done = let_leave(n, how, who, stage)
    assert done.returncode, f"the job ended with code 0: {done.stderr}"
    right = (who + 1) % n
    sentence = f"rank {who} has ended its program, but rank {right} waits for it in {WAITS[stage]} (float32)"
    assert sentence in done.stderr, f"not said: {sentence}\n{done.stderr}"
    assert how != "hook" or "a prettier traceback" in done.stderr, done.stderr


def test_an_interrupt_of_one_rank_ends_the_job_with_its_name() -> None:
    done = let_leave(3, "SIGINT", 2, "Zero3")
    assert done.returncode, f"the job ended with code 0: {done.stderr}"
    assert "[rank 2/3] interrupted" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("deaf", [0, 2])
def test_of_an_interrupt_of_all_ranks_the_lowest_that_hears_it_says_one_line(deaf: int) -> None:
    done = let_leave(5, "Ctrl-C", deaf, "Zero3")
    said = re.findall(r"\[rank (\d)/5\] (.*)", done.stderr)
    assert done.returncode and said == [(str(int(not deaf)), "interrupted")], done.stderr


@pytest.mark.parametrize(("n", "how", "who", "stage"), [(3, "SIGKILL", 1, "Zero2"), (2, "SIGTERM", 0, "Zero3")])
def test_a_rank_that_is_killed_ends_the_job_and_the_launcher_says_so(n: int, how: str, who: int, stage: str) -> None:
    """It can say nothing itself, and the launcher ends the others before they could; which one it names, is its own."""
    done = let_leave(n, how, who, stage)
    assert done.returncode, f"the job ended with code 0: {done.stderr}"
    assert re.search("killed|terminated", done.stdout + done.stderr, re.IGNORECASE), done.stdout + done.stderr


def test_a_rank_that_leaves_by_os_exit_ends_the_job() -> None:
    """os._exit(0) tells nobody, and says that all is well: some launchers believe it, so the code may be 0."""
    done = let_leave(3, "os._exit(0)", 1, "Zero2")
    assert "has not ended this rank" not in done.stderr, done.stderr


def test_the_code_of_a_rank_that_nobody_waits_for_is_the_jobs() -> None:
    done = let_leave(3, "at the end", 1, "Zero2")
    assert done.returncode, "sys.exit(3) after the training was lost"
    assert "Traceback" not in done.stderr, f"nobody was waiting, but somebody complains: {done.stderr}"


@pytest.fixture(scope="module", params=[2, 3, 5])
def job(request: pytest.FixtureRequest) -> Done:
    """It ends with the first claim that does not hold."""
    return run_ranks(request.param, JOB, check=False, timeout=240)


@pytest.mark.parametrize("claim", CLAIMS)
def test_ranks(job: Done, claim: str) -> None:
    assert f"ok {claim}\n" in job.stdout, job.stdout + job.stderr


def test_the_job_makes_these_claims_and_ends_well_and_in_silence(job: Done) -> None:
    assert job.stdout == "".join(f"ok {claim}\n" for claim in CLAIMS) and len(CLAIMS) == 16
    assert job.returncode == 0 and not job.stderr, job.stderr
