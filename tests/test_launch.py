"""The launcher itself: every other MPI test believes it."""

import os
import time
from pathlib import Path

import pytest

from launch import ROOT, run_python, run_ranks


def write(folder: Path, code: str) -> Path:
    script = folder / "job.py"
    script.write_text("from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n" + code)
    return script


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_runs_and_speaks(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nsys.stdout.write(f'{comm.rank} {comm.size} {sys.argv[1:]}\\n')\n")
    done = run_ranks(3, script, "one", 2)
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 ['one', '2']" for rank in range(3)]


def test_a_job_starts_in_the_root_with_the_given_environment(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import os, minizero\nprint(os.getcwd(), os.environ['FLAVOUR'], sep='\\n')\n")
    done = run_python(script, env={"FLAVOUR": "sour"})
    assert done.stdout.splitlines() == [str(ROOT), "sour"]


def test_a_failing_rank_fails_the_job_and_its_output_is_shown(tmp_path: Path) -> None:
    script = write(tmp_path, "print('before')\ncomm.Barrier()\nif comm.rank == 1:\n    comm.Abort(7)\ncomm.recv()\n")
    with pytest.raises(AssertionError, match=r"(?s)exit code 7: .*job\.py.*--- stdout ---.*before"):
        run_ranks(3, script)
    assert run_ranks(3, script, check=False).returncode == 7


def test_a_deadlock_is_killed_within_the_timeout_and_no_process_survives(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\nsys.stdout.write(f'{os.getpid()}\\n')\n"
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.recv(source=(comm.rank + 1) % comm.size)\n"
    )
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="killed after 5 s") as caught:
        run_ranks(3, script, timeout=5)
    assert time.monotonic() - start < 20
    pids = [int(line) for line in str(caught.value).splitlines() if line.isdigit()]
    assert len(pids) == 3, str(caught.value)
    patience = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < patience:
        time.sleep(0.1)
    assert not any(map(alive, pids))
