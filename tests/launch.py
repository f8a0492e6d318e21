"""How does a test start N ranks, and be sure that none of them outlives it?

The job runs in a process group of its own, its output goes to files (a pipe would stay open as long as any
stray rank lives), and whatever happens the whole process group is killed before the call returns.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = str(Path(sys.executable).parent)  # not resolved: the environment's, not the interpreter's behind it

OPEN_MPI = {  # as root, and on more ranks than cores; other MPIs ignore it
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
PATIENCE = float(os.environ.get("MINIZERO_TEST_PATIENCE", "1"))  # times as long as usual, before a job is ended
Done = subprocess.CompletedProcess[str]


def python_path(*places: Path) -> str:
    """PYTHONPATH: first these, then the repository, then what it was."""
    return os.pathsep.join(filter(None, [*map(str, places), str(ROOT), os.environ.get("PYTHONPATH")]))


STRICT = {  # a job or the suite on the stand-in for CuPy, its messages through pinned memory ...
    "MINIZERO_BACKEND": "cupy",
    "PYTHONPATH": python_path(ROOT / "tests" / "strict"),
    "MINIZERO_MPI_CUDA": "0",
    "STRICT_GRAIN": "1",  # bytes that its memory pool counts in; a real one's are 512
}
AWARE = {**STRICT, "MINIZERO_MPI_CUDA": "1", "STRICT_CUDA_AWARE": "1"}  # ... or straight from its memory


def run_ranks(n: int, script: str | Path, *args: object, **options: Any) -> Done:
    """Run `python script args` on `n` ranks with the environment's own MPI; the rest as in `run_python`."""
    mpiexec = shutil.which("mpiexec", path=BIN) or shutil.which("mpiexec")
    assert mpiexec, f"no mpiexec beside {sys.executable} and none on PATH: pip install mpich, or load an MPI"
    return run_python(script, *args, launcher=(mpiexec, "-n", str(n)), **options)


def run_python(
    script: str | Path,
    *args: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    launcher: tuple[str, ...] = (),
) -> Done:
    """Run `python script args` from the repository's root; `env` is added to this process's environment.

    `script` may be an option of Python's: `run_python("-m", "minizero", "doctor")`. Output is unbuffered,
    so lines that several ranks `print` at once may mingle: let one rank print, or write whole lines.
    Raises TimeoutError after `timeout` seconds and, with `check`, AssertionError for a non-zero exit;
    both show the end of stdout and stderr.
    """
    command = [*launcher, sys.executable, str(script), *map(str, args)]
    path = {
        "PATH": os.pathsep.join([BIN, os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": python_path(),
    }
    environment = {**os.environ, **OPEN_MPI, **path, "PYTHONUNBUFFERED": "1", **(env or {})}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            job.wait(timeout * PATIENCE)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill(job)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    done = Done(command, job.returncode, *texts)
    if timed_out:
        raise TimeoutError(f"killed after {timeout:g} s: {_tail(done)}")
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {_tail(done)}")
    return done


def seconds_to_end(done: Done) -> float:
    """How long a job went on after a rank of it had printed `leaving at` and the time."""
    ended = time.time()
    left = re.search(r"leaving at ([\d.]+)", done.stdout)
    assert left, f"no rank came to the point of leaving: {_tail(done)}"
    return ended - float(left[1])


def _kill(job: subprocess.Popen[bytes]) -> None:
    """Ask first, as a launcher passes SIGTERM on to ranks outside its group; then end what is left of it."""
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _tail(done: Done, lines: int = 60) -> str:
    out, err = ("\n".join(text.splitlines()[-lines:]) for text in (done.stdout, done.stderr))
    return f"{' '.join(done.args)}\n--- stdout ---\n{out}\n--- stderr ---\n{err}"
