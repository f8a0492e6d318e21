"""MPI, as the stand-in sees it: each call that is given memory is looked at, also that of the host. See __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np

from .cuda import Fault, clock

CALLS = ("Send", "Isend", "Ssend", "Issend", "Bsend", "Ibsend", "Rsend", "Irsend", "Recv", "Irecv", "Sendrecv", "Bcast",
         "Gather", "Scatter", "Allgather", "Alltoall", "Reduce", "Allreduce", "Gatherv", "Allgatherv")  # fmt: skip


def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **keywords: Any) -> Any:
        for given in (*args, *keywords.values()):
            for array in given if isinstance(given, list | tuple) else [given]:
                if isinstance(array, np.ndarray) and clock.in_flight(array.ctypes.data, array.nbytes):
                    raise Fault(f"MPI's {name} was given pinned memory that a copy still reads or writes")
        return call(self, *args, **keywords)

    return run


def install() -> None:
    """Make MPI.COMM_WORLD, and all communicators that come from it, look at what they are given."""
    mpi4py.rc(initialize=False, finalize=True)  # as minizero does, where it is the first to load MPI
    from mpi4py import MPI

    methods = {name: watched(name, getattr(MPI.Comm, name)) for name in CALLS}
    strict, start = type("StrictComm", (MPI.Intracomm,), methods), MPI.Init_thread

    def replace(*args: Any) -> Any:
        level = start(*args) if not MPI.Is_initialized() else None
        for name in ("COMM_WORLD", "COMM_SELF"):
            setattr(MPI, name, strict(getattr(MPI, name)))
        return level

    if MPI.Is_initialized():
        replace()
    else:
        MPI.Init_thread = replace  # type: ignore[assignment]
