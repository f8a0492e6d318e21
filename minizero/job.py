"""How does this process become one rank of a job, and how does the job end when one rank fails?

MPI waits for ever for a rank that has failed. So an exception that nobody catches is printed with its rank's number,
and ends all ranks; so does Ctrl-C, in one line. (A rank that ends its program in order says so: see comm.py.)
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType, TracebackType

import mpi4py

mpi4py.rc(initialize=False, finalize=True)  # first see whether launcher and library fit: see `_initialise`
try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"minizero finds no MPI library ({str(error).splitlines()[0]}): pip install mpich, or load your site's MPI "
        "module and, if it is not found then, set MPI4PY_LIBMPI=/path/to/libmpi.so"
    ) from None

MEND = (
    "put the bin directory of that MPI first on PATH (source .venv/bin/activate), or point MPI4PY_LIBMPI at the "
    "launcher's libmpi.so; `python -m minizero doctor` shows both"
)

_interrupted = -math.inf  # when Ctrl-C came last


def launched_ranks() -> int:
    """How many processes the launcher says it has started, by its environment variables; 1 if it says nothing."""
    variables = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    return max((int(os.environ[name]) for name in variables if os.environ.get(name, "").isdigit()), default=1)


def local_rank() -> int:
    """The launcher's number for this process among those of its node, from 0. Collective only where it gives none."""
    variables = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID")
    for name in (*variables, "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    number = node.rank
    node.Free()
    return number


def _initialise() -> None:
    """Start MPI. Under Open MPI's launcher another library would end in its own words: say it in ours."""
    library = MPI.Get_library_version()
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in library and "PMI_SIZE" not in os.environ:
        raise RuntimeError(f"mpirun is Open MPI's, but mpi4py loaded {library.splitlines()[0].strip()}: {MEND}")
    MPI.Init_thread()


def abort(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Print the traceback, each line with this rank's number, and end the whole job. Of Ctrl-C, only that it came."""
    if kind is SystemExit:  # which ends a thread, and nothing else
        return
    world, interrupted = MPI.COMM_WORLD, issubclass(kind, KeyboardInterrupt)
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    if interrupted:
        time.sleep(
            1.5 * (world.rank > 0) + 0.5 * min(world.rank, 6)
        )  # all hear of it: the lowest that can speaks for all
        lines = ["interrupted"]
    with suppress(OSError, ValueError):  # closed, or nobody reads it any more
        sys.stdout.write("\n" * interrupted)  # below a line that was growing
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"[rank {world.rank}/{world.size}] {line}\n" for line in lines))  # nobody cuts in
        sys.stderr.flush()
    time.sleep(0.2)  # launchers end the job at once: let them first pass on what was written
    world.Abort(130 if interrupted else 1)
    os._exit(1)  # where Abort returns, we would say LEFT before the launcher has ended us


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C reaches a rank twice, from the terminal and from the launcher: once is enough."""
    global _interrupted
    before, _interrupted = _interrupted, time.monotonic()
    if _interrupted - before > 1:
        raise KeyboardInterrupt


if not MPI.Is_initialized():
    _initialise()
if MPI.COMM_WORLD.size > 1:
    sys.excepthook = abort
    threading.excepthook = lambda args: abort(*args[:3])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
