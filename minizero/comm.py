"""How does one message get from this rank to its neighbour, from host or GPU memory?

All ranks form a ring. `exchange` hands one buffer to the right neighbour and receives one from the left:

        rank 0 ---> rank 1 ---> rank 2 ---> ... ---> rank N-1 ---> rank 0

MPI only moves bytes here and never adds, so every dtype works, and the order of additions is ours.

Every message carries a tag that says what its sender is doing: operation, unit, dtype. The receiver looks at tag
and size before it takes a message. Ranks that have drifted apart raise at once and name both sides; the error
travels on round the ring, so that everybody raises. A rank that ends its program says so, with a message LEFT: who
still waits for it raises, too. (Messages between two ranks, for pipelines, are in point.py.)
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from . import backend
from .backend import Array, xp
from .job import MEND, launched_ranks, local_rank
from .job import MPI as MPI
from .transport import FORCE, check_target, cuda_aware, message, transport

OPERATIONS = (
    "exchange", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "control", "gather_parameters", "checkpoint",
    "pipeline",
)  # fmt: skip
DTYPES = [
    *backend.DTYPES, "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
DTYPE_NUMBER = {np.dtype(name): number for number, name in enumerate(DTYPES)}
LEFT, FAILED, FIRST_TAG = 0, 1, 2  # tags on our communicators; from FIRST_TAG on: what is being done
PAUSE = 50e-6  # seconds between two looks for a message, where there are more ranks than cores
PATIENCE = 5.0  # seconds that a rank which failed waits for the news to come round

_rings: list[MPI.Comm] = []  # our communicators: at exit, LEFT goes to the right neighbour in each ...
_awaited: list[MPI.Comm] = []  # ... and is awaited in these, where the left neighbour has not said it yet


class CollectiveError(RuntimeError):
    """The ranks of a communicator are not doing the same thing, or one has ended. Raised on all of them."""


class Communicator:
    """The ranks that train together, in a ring.

    Collective: all ranks of `mpi` must make one. Every rank of the job must import minizero, also one that trains
    nothing: at exit, all wait for all.

    Args:
        mpi: an mpi4py communicator; MPI.COMM_WORLD where it is left out. A duplicate is used, so that
            messages of yours and ours cannot be mistaken for each other.

    Attributes:
        rank, size: this rank's number in the ring, and N, the number of ranks.
        traffic: bytes handed to MPI for sending so far, by operation. `traffic.clear()` starts anew.
        mpi: the mpi4py communicator underneath.
        device: this rank's device, in words; local_rank, local_size: the same as rank, size within the node.
    """

    def __init__(self, mpi: MPI.Comm | None = None) -> None:
        self._check_launcher()
        ours = self._meet(MPI.COMM_WORLD if mpi is None else mpi)
        node = ours.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        self.device = backend.device
        self._crowded = self.local_size > (os.cpu_count() or 1)  # more ranks than cores
        self._own(ours)

    def _own(self, mpi: MPI.Comm) -> None:
        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        self.right, self.left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.traffic: Counter[str] = Counter()
        self.beyond: Communicator | None = None  # a Mesh says: all ranks that hold a part of the same model ...
        self.part = ""  # ... what this group's part of it is called ...
        self.counts_copies = True  # ... and does this group, of those that hold the same parameter, count it?
        self._departures: list[Any] = []  # what `point.send` has sent, and may not have arrived
        self._operation, self._unit, self._broken = "exchange", 0, ""  # unit 0: none; unit i of an engine is i + 1
        self._tag = FIRST_TAG  # of messages that are sent now, but for their dtype
        self._names: Sequence[str] = ()
        self._job = mpi.group.Translate_ranks(None, MPI.COMM_WORLD.group)  # each rank's number in the whole job
        self._scratch, self._transport = xp.empty(0, np.uint8), transport(self._crowded)
        tags = min(mpi.Get_attr(MPI.TAG_UB) or 32_767, 2**30) - FIRST_TAG
        self._most_units = tags // len(OPERATIONS) // len(DTYPES) - 1
        _rings.append(mpi)
        _awaited.append(mpi)

    def split(self, color: int, key: int | None = None) -> Communicator:
        """The communicator of all ranks that give the same `color`, ordered by `key` (default: by rank).

        Collective over this communicator.
        """
        token = np.zeros(1, np.uint8)
        with self.label("control"):  # MPI's Split would wait for ever for a rank that does something else
            for _ in range(self.size - 1):
                self.exchange(token, token.copy())
        part = copy.copy(self)  # on the same node and device
        part._own(self.mpi.Split(color, self.rank if key is None else key))
        return part

    def exchange(self, send: Array, recv: Array) -> None:
        """Send `send` to the right neighbour, fill `recv` from the left one. Collective over the ring.

        Both are contiguous arrays of any shape; all ranks send the same dtype, and what the left neighbour sends
        has the bytes of `recv`. Raises CollectiveError where neighbours differ: on every rank, within N calls.
        """
        if self._broken:
            raise CollectiveError(self._broken)
        tag = self._tag + number_of(send.dtype)
        outgoing, incoming = message(send, self._operation), message(recv, self._operation)
        check_target(outgoing, incoming, self._operation)
        piece, largest = self._transport.largest, max(outgoing.size, incoming.size)
        if largest >= piece and outgoing.size != incoming.size:
            raise ValueError(f"{self._operation}: {outgoing.size} bytes to send, {incoming.size} to receive: "
                             f"from {piece} bytes on, both must be the same")  # fmt: skip
        self.traffic[self._operation] += outgoing.size
        if largest < piece:
            self._swap(outgoing, incoming, tag)
        else:  # in pieces; one that is shorter, maybe empty, is the last: ranks that differ by whole pieces notice
            for at in range(0, largest + 1, piece):
                self._swap(outgoing[at : at + piece], incoming[at : at + piece], tag)

    def _swap(self, outgoing: Array, incoming: Array, tag: int) -> None:
        """One message to the right, one from the left."""
        status, way = MPI.Status(), self._transport
        departure = self.mpi.Isend([way.outgoing(outgoing), MPI.BYTE], self.right, tag)
        self._until(self.mpi.Probe, self.mpi.Iprobe, self.left, MPI.ANY_TAG, status)
        if status.Get_tag() != tag or status.Get_count(MPI.BYTE) != incoming.size:
            self._disagree(departure, tag, incoming.size, status)
        landing = way.incoming(incoming)
        arrival = self.mpi.Irecv([landing, MPI.BYTE], self.left, tag)
        self._until(arrival.Wait, arrival.Test)
        self._until(departure.Wait, departure.Test)
        way.arrived(landing, incoming)

    def scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """An array (count,) of `dtype` whose memory is used again by the next call."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = xp.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    @contextmanager
    def label(self, operation: str = "", unit: int = -1, names: Sequence[str] = ()) -> Iterator[None]:
        """Messages inside say that they belong to `operation` and to unit number `unit` of those called `names`.

        The outermost operation wins: an all-reduce stays one when it calls reduce-scatter. The names stay for later.
        """
        before = self._operation, self._unit, self._tag
        if operation and self._operation == "exchange":
            self._operation = operation
        if unit >= 0:
            if unit >= self._most_units:
                raise ValueError(f"{unit + 1} units are more than the {self._most_units} that this MPI's tags can name")
            self._unit, self._names = unit + 1, names
        doing = self._unit * len(OPERATIONS) + OPERATIONS.index(self._operation)
        self._tag = FIRST_TAG + doing * len(DTYPES)
        try:
            yield
        finally:
            self._operation, self._unit, self._tag = before

    def _until(self, wait: Callable[..., Any] | None, ask: Callable[..., Any], *args: Any) -> None:
        """Return when MPI has done something: `wait` (if there is one) waits for it, `ask` says whether it is done.

        MPI waits by asking again and again, as fast as it can. Where ranks share cores, that takes the time of those
        who have something to send: there, give way after each look, and sleep if that does not help.
        """
        if wait and not self._crowded:
            wait(*args)
        looks = 0
        while (self._crowded or not wait) and not ask(*args):
            looks += self._crowded
            if looks > 5:
                time.sleep(PAUSE)
            else:
                os.sched_yield()

    # What follows is about ranks that do not do the same. Training never comes here.

    def _doing(self, tag: int) -> str:
        """What the tag of a message says, in words."""
        rest, dtype = divmod(tag - FIRST_TAG, len(DTYPES))
        unit, operation = divmod(rest, len(OPERATIONS))
        name = self._names[unit - 1] if 0 < unit <= len(self._names) else f"unit {unit - 1}"
        return OPERATIONS[operation] + (f" of {name}" if unit else "") + f" ({DTYPES[dtype]})"

    def _complaint(self, source: int, mine: int, wanted: int | None, status: MPI.Status) -> str:
        """What is wrong with a message from `source`, while this rank is at tag `mine`. (None: any size and dtype.)"""
        other, me, doing = f"rank {self._job[source]}", f"rank {self._job[self.rank]}", self._doing(mine)
        doing = doing if wanted is not None else doing.rsplit(" (", 1)[0]
        theirs, got = status.Get_tag(), status.Get_count(MPI.BYTE)
        if theirs == FAILED:
            return str(self.mpi.recv(source=source, tag=FAILED))
        if theirs == LEFT:
            return f"{other} has ended its program, but {me} waits for it in {doing}: all must take part"
        if theirs == mine:
            return f"{other} sent {got} bytes, but {me} expects {wanted} in {doing}: their arrays differ in size"
        return (f"{other} is in {self._doing(theirs)}, but {me} is in {doing}: "
                "every rank must call the same collectives in the same order")  # fmt: skip

    def _disagree(self, departure: MPI.Request, mine: int, wanted: int, status: MPI.Status) -> NoReturn:
        """Raise for a message that is not the expected one, after telling the right neighbour."""
        self._broken = self._complaint(self.left, mine, wanted, status)
        self._transport.abandon()
        news = self.mpi.isend(self._broken, self.right, FAILED)
        self._last = [departure, news]  # kept, since MPI may go on reading these buffers
        end = time.monotonic() + PATIENCE
        over = status.Get_tag() == FAILED  # else the left neighbour may send on until the news has come round to it
        while not (over and MPI.Request.Testall(self._last)) and time.monotonic() < end:
            over = over or _drain(self.mpi) in (FAILED, LEFT)
            time.sleep(0.001)
        raise CollectiveError(self._broken)

    @staticmethod
    def _meet(mpi: MPI.Comm) -> MPI.Comm:
        """A duplicate of `mpi`, for which all its ranks must come here. Raises where one of them has ended."""
        ours, made = mpi.Idup()
        while not made.Test():
            for number in mpi.group.Translate_ranks(None, MPI.COMM_WORLD.group) if _opened.Test() else ():
                if _hall.Iprobe(number, LEFT):
                    raise CollectiveError(f"rank {number} ended its program before it made its Communicator")
            time.sleep(0.0005)
        return ours

    @staticmethod
    def _check_launcher() -> None:
        """Refuse to be N times rank 0 of 1: what happens under a launcher of another MPI than the library's."""
        started = launched_ranks()
        if MPI.COMM_WORLD.size == 1 and started > 1:
            library = MPI.Get_library_version().splitlines()[0].strip("\0 ,")
            raise RuntimeError(
                f"the launcher started {started} processes, but each of them is rank 0 of 1: mpirun (or srun) belongs "
                f"to another MPI than the library that mpi4py loaded, which is {library}: {MEND}"
            )


def number_of(dtype: np.dtype[Any]) -> int:
    """What stands for `dtype` in a tag. Raises TypeError for what ranks do not send."""
    number = DTYPE_NUMBER.get(dtype)
    if number is None:
        raise TypeError(f"arrays of dtype {dtype} are not sent between ranks, only of {', '.join(DTYPES)}")
    return number


def _drain(mpi: MPI.Comm) -> int:
    """Receive and forget one message from the left neighbour if there is one. Returns its tag, -1 for none."""
    left, status = (mpi.rank - 1) % mpi.size, MPI.Status()
    if not mpi.Iprobe(left, MPI.ANY_TAG, status):
        return -1
    tag = int(status.Get_tag())
    mpi.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE], left, tag)
    if tag == LEFT:
        _awaited.remove(mpi)
    return tag


def _farewell() -> None:
    """At exit: say LEFT to whoever may wait for this rank, and stay until all that may say it have done so."""
    if MPI.Is_finalized():
        return
    while not _opened.Test():  # until every rank has imported this file
        time.sleep(0.001)
    others = set(range(_hall.size)) - {_hall.rank}
    said = [_hall.Isend([b"", MPI.BYTE], rank, LEFT) for rank in others]
    said += [mpi.Isend([b"", MPI.BYTE], (mpi.rank + 1) % mpi.size, LEFT) for mpi in _rings]
    while others or _awaited or not MPI.Request.Testall(said):
        for mpi in list(_awaited):
            _drain(mpi)
        for rank in list(others):
            if _hall.Iprobe(rank, LEFT):
                _hall.Recv([bytearray(0), MPI.BYTE], rank, LEFT)
                others.remove(rank)
        time.sleep(0.001)


def _take_device() -> None:
    """Take this rank's GPU, and say once where messages cannot go straight from one to the next."""
    backend.use_device(local_rank())
    direct, why = cuda_aware()
    if not (direct or os.environ.get(FORCE) or MPI.COMM_WORLD.rank) and MPI.COMM_WORLD.size > 1:
        sys.stderr.write(
            f"minizero: messages between GPUs go through host memory, since this MPI is not known to be CUDA-aware "
            f"({why}). If it is, set {FORCE}=1\n"
        )


if backend.name == "cupy":  # before anybody can allocate an array
    _take_device()
_hall, _opened = MPI.COMM_WORLD.Idup()  # ours alone: a message of ours must not answer a receive of the user's
if MPI.COMM_WORLD.size > 1:
    atexit.register(_farewell)
else:
    _opened.Wait()
