"""What happens when ranks do not do the same: they differ, fail, leave, or simply end at different times?"""

import re

import pytest

from launch import Done, run_ranks, seconds_to_end

END_WITHIN = 10  # seconds after a rank has left
WAITS = {  # what the others wait for, where they come to; by `where` of jobs/ranks_leave.py
    "all_reduce": "all_reduce (float64)",
    "16 MiB": "all_gather (float64)",
    "half": "all_reduce (float64)",
    "split": "control (uint8)",
    "backward": "reduce_scatter of layers.1 (float32)",
}


def let_leave(n: int, how: str, who: int, where: str) -> Done:
    """Run the job; it must have ended, non-zero, soon after `who` left."""
    done = run_ranks(n, "tests/jobs/ranks_leave.py", how, who, where, check=False, timeout=90)
    took = seconds_to_end(done)
    assert took < END_WITHIN, f"the job went on for {took:.1f} s: {done.stderr}"
    assert done.returncode, f"the job ended with code 0: {done.stdout}{done.stderr}"
    for line in done.stderr.splitlines():
        python_line = re.search(r'Traceback|^\s+File "|Error\b', line) and "MPI_Abort" not in line
        assert not python_line or re.match(rf"\0?\[rank \d/{n}\] ", line), f"no rank before: {line}"
    return done


@pytest.mark.parametrize(
    ("n", "how", "who", "where"),
    [
        (2, "raises", 1, "all_reduce"), (3, "raises", 0, "backward"), (3, "raises", 1, "half"),
        (3, "raises", 2, "Communicator"), (8, "raises", 7, "16 MiB"), (3, "thread", 1, "all_reduce"),
        (2, "thread", 0, "split"),
    ],
)  # fmt: skip
def test_a_rank_that_raises_ends_the_job_with_its_traceback(n: int, how: str, who: int, where: str) -> None:
    done = let_leave(n, how, who, where)
    mine = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {who}/{n}] ")]
    text = "\n".join(mine)
    assert "the reason" in text and "KeyError" in text and "ranks_leave.py" in text, done.stderr
    assert f"[rank {who}/{n}] Traceback (most recent call last):" in mine, done.stderr
    assert "has ended" not in done.stderr, f"a rank that failed was taken for one that ended: {done.stderr}"


@pytest.mark.parametrize(
    ("n", "how", "who", "where"),
    [
        (3, "sys.exit", 0, "all_reduce"), (3, "sys.exit", 1, "16 MiB"), (2, "sys.exit", 1, "16 MiB"),
        (3, "sys.exit", 2, "split"), (3, "sys.exit", 2, "half"), (8, "sys.exit", 3, "half"),
        (2, "sys.exit", 0, "backward"), (3, "SystemExit", 1, "backward"), (3, "exit", 2, "all_reduce"),
        (3, "returns", 0, "backward"),
        (8, "returns", 7, "all_reduce"), (2, "returns", 1, "split"),
    ],
)  # fmt: skip
def test_a_rank_that_ends_too_early_ends_the_job_with_its_name(n: int, how: str, who: int, where: str) -> None:
    done = let_leave(n, how, who, where)
    after = (who + 1) % n if where != "half" else (who - 2) % n if n == 8 else (who + 2) % 4
    sentence = f"rank {who} has ended its program, but rank {after} waits for it in {WAITS[where]}"
    assert sentence in done.stderr, f"not said: {sentence}\n{done.stderr}"


@pytest.mark.parametrize(
    ("n", "how", "who", "where"),
    [
        (2, "sys.exit", 0, "Communicator"), (3, "returns", 1, "Communicator"), (8, "sys.exit", 7, "Communicator"),
        (3, "sys.exit", 2, "Communicator(half)"), (8, "returns", 2, "Communicator(half)"),
    ],
)  # fmt: skip
def test_a_rank_that_never_makes_its_communicator_ends_the_job(n: int, how: str, who: int, where: str) -> None:
    done = let_leave(n, how, who, where)
    assert f"rank {who} ended its program before it made its Communicator" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("n", "how", "who", "where"),
    [
        (2, "killed", 0, "all_reduce"), (3, "killed", 2, "16 MiB"), (8, "killed", 4, "backward"),
        (3, "killed", 1, "Communicator"), (3, "os._exit", 1, "split"), (2, "os._exit", 1, "half"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_without_a_word_ends_the_job(n: int, how: str, who: int, where: str) -> None:
    let_leave(n, how, who, where)  # what is said is the launcher's business


@pytest.mark.parametrize("n", [2, 3, 5])
def test_ranks_that_end_at_different_times_end_well_and_in_silence(n: int) -> None:
    done = run_ranks(n, "tests/jobs/ranks_end_well.py", timeout=90)
    assert not done.stderr, done.stderr
    ended = sorted(done.stdout.splitlines())
    assert ended == ["rank 0 is the last", *(f"rank {rank} ends" for rank in range(1, n))], done.stdout


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_ranks_in_different_collectives_all_raise_and_name_both_sides(n: int) -> None:
    run_ranks(n, "tests/jobs/ranks_mismatch.py", timeout=240)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_ranks_that_train_differently_all_raise_or_have_the_right_numbers(n: int) -> None:
    done = run_ranks(n, "tests/jobs/ranks_engine.py", timeout=120)
    assert done.stdout.count("done") == n, done.stdout
