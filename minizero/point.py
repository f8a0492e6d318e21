"""How does one message go from any rank to any other?

    rank 0   send(comm, array, 1)                  returns at once; the array must stay as it is until it has arrived
    rank 1   receive(comm, 0)                      waits for the next message of rank 0

The ring is enough where all ranks do the same. In a pipeline they take turns, and messages go both ways: activations
to the right, gradients to the left. A rank that waited for its neighbour to take a message, while that one waits
likewise, would wait for ever. So nobody waits to send.

As in the ring, a message carries a tag that says what its sender is doing, the receiver compares it with what it is
doing itself, and a rank that has left, or failed, is missed by whoever waits for it.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import NoReturn

import numpy as np

from . import comm as rings
from .backend import Array, xp
from .comm import DTYPES, FAILED, LEFT, MPI, CollectiveError, Communicator, number_of
from .transport import LARGEST, message

GRACE = 0.5  # seconds in which a message may still come from a rank that has said LEFT


def send(comm: Communicator, array: Array, to: int) -> None:
    """Send a contiguous array to rank `to`, which must call `receive`. Do not change it before that has happened.

    Raises TypeError for a dtype that has no tag, ValueError for more bytes than one message can have.
    """
    _check(comm)
    tag, outgoing = comm._tag + number_of(array.dtype), comm._transport.lasting(message(array, "send"))
    if outgoing.size > LARGEST:
        raise ValueError(f"send: {outgoing.size:,} bytes are more than the {LARGEST:,} of one message: send parts")
    comm.traffic[comm._operation] += outgoing.size
    comm._departures.append((comm.mpi.Isend([outgoing, MPI.BYTE], to, tag), outgoing))


def receive(comm: Communicator, source: int, library: ModuleType = xp) -> Array:
    """What rank `source` sends next: a new array (n,) of `library` (NumPy or `xp`), of the dtype that was sent.

    Raises CollectiveError where `source` does something else than this rank, or has ended its program: here, and on
    every rank of `comm` that waits for a message of this one.
    """
    _check(comm)
    status = MPI.Status()
    _wait(comm, source, status)
    dtype = status.Get_tag() - comm._tag
    if not 0 <= dtype < len(DTYPES):
        fail(comm, comm._complaint(source, comm._tag, None, status))
    incoming = library.empty(status.Get_count(MPI.BYTE), np.uint8)
    landing = comm._transport.incoming(incoming)
    arrival = comm.mpi.Irecv([landing, MPI.BYTE], source, status.Get_tag())
    comm._until(arrival.Wait, arrival.Test)
    comm._transport.arrived(landing, incoming)
    return incoming.view(DTYPES[dtype])


def fail(comm: Communicator, reason: str) -> NoReturn:
    """Raise CollectiveError, here and on every rank of `comm` that waits for this one; nobody can use `comm` again."""
    comm._broken = reason
    comm._last = [comm.mpi.isend(reason, rank, FAILED) for rank in range(comm.size) if rank != comm.rank]
    raise CollectiveError(reason)


def _wait(comm: Communicator, source: int, status: MPI.Status) -> None:
    """Until a message from `source` is there. If none can come any more, `status` has the tag LEFT."""
    left: list[float] = []  # when it was seen that `source` has ended its program

    def come() -> bool:
        if comm.mpi.Iprobe(source, MPI.ANY_TAG, status):
            return True
        if not left and rings._opened.Test() and rings._hall.Iprobe(comm._job[source], LEFT):
            left.append(time.monotonic())
        if not left or time.monotonic() < left[0] + GRACE:
            return False
        status.Set_tag(LEFT)
        return True

    comm._until(None, come)


def _check(comm: Communicator) -> None:
    """Refuse a broken communicator; let go of what has arrived."""
    if comm._broken:
        raise CollectiveError(comm._broken)
    comm._departures = [each for each in comm._departures if not each[0].Test()]
