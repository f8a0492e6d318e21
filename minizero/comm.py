"""How does one message get from this rank to its neighbour, from host or GPU memory?

All ranks form a ring. `exchange` hands one buffer to the right neighbour and receives one from the left:

        rank 0 ---> rank 1 ---> rank 2 ---> ... ---> rank N-1 ---> rank 0

MPI only moves bytes here and never adds, so every dtype works, and the order of additions is ours.

Every message carries a tag that says what its sender is doing: which operation, on which unit. The receiver
accepts any tag and compares. Ranks that have drifted apart raise at once and name both sides; the error then
travels round the ring, so that everybody raises. A rank that ends its program says so with a message LEFT: who
still waits for it raises too, and nothing hangs.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from . import backend
from .backend import Array, xp

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"minizero cannot load an MPI library ({error}): pip install 'minizero[mpi]', or load your site's MPI "
        "module and, if it is not found, set MPI4PY_LIBMPI=/path/to/libmpi.so"
    ) from error

OPERATIONS = ("exchange", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "control", "gather_parameters")
LEFT, FAILED, REASON, FIRST_TAG = 0, 1, 2, 3  # tags on our own communicators; FIRST_TAG + label are the rest
WORLD_LEFT, WORLD_HELLO = 32_767, 32_766  # tags on MPI's communicators: the largest that every MPI allows
REASON_BYTES = 2_000
PATIENCE = 5.0  # seconds that a rank which failed waits for the news to come round the ring

_parted: list[tuple[MPI.Comm, int]] = []  # (communicator, its LEFT tag): where to say LEFT at exit


class CollectiveError(RuntimeError):
    """The ranks of a communicator are not doing the same thing, or one has ended. Raised on all of them."""


class Communicator:
    """The ranks that train together, in a ring.

    Collective: all ranks of `mpi` must make one. Each takes its device (rank on its node mod devices).

    Args:
        mpi: an mpi4py communicator; MPI.COMM_WORLD where it is left out. A duplicate is used, so that other
            messages of yours cannot be mistaken for ours.

    Attributes:
        rank, size: this rank's number in the ring, and N, the number of ranks.
        traffic: bytes handed to MPI for sending so far, by operation. `traffic.clear()` starts anew.
        mpi: the mpi4py communicator underneath.
        device: this rank's device, in words; local_rank, local_size: the same as rank, size within the node.
    """

    def __init__(self, mpi: MPI.Comm | None = None) -> None:
        self._check_launcher()
        parent = MPI.COMM_WORLD if mpi is None else mpi
        self._meet(parent)
        node = parent.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        self.device = backend.use_device(self.local_rank)
        self._own(parent.Dup())

    def _own(self, mpi: MPI.Comm) -> None:
        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        self.right, self.left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.traffic: Counter[str] = Counter()
        self._operation, self._unit = "exchange", 0  # unit 0: none; unit i of an engine is i + 1
        self._names: Sequence[str] = ()
        self._broken = ""
        self._scratch = xp.empty(0, np.uint8)
        self._most_units = (min(mpi.Get_attr(MPI.TAG_UB) or 32_767, 2**30) - FIRST_TAG) // len(OPERATIONS) - 1
        _parted.append((mpi, LEFT))

    def split(self, color: int, key: int | None = None) -> Communicator:
        """The communicator of all ranks that give the same `color`, ordered by `key` (default: by rank).

        Collective over this communicator.
        """
        self._everyone()
        part = object.__new__(Communicator)
        part.local_rank, part.local_size, part.device = self.local_rank, self.local_size, self.device
        part._own(self.mpi.Split(color, self.rank if key is None else key))
        return part

    def exchange(self, send: Array, recv: Array) -> None:
        """Send `send` to the right neighbour, fill `recv` from the left one. Collective over the ring.

        Both are contiguous arrays of any shape and dtype; what the left neighbour sends must have the bytes of
        `recv`. Raises CollectiveError, on all ranks, where the neighbours are not doing the same.
        """
        if self._broken:
            raise CollectiveError(self._broken)
        outgoing, incoming = self._to_mpi(send), self._to_mpi(recv)
        tag = FIRST_TAG + self._unit * len(OPERATIONS) + OPERATIONS.index(self._operation)
        status = MPI.Status()
        self.traffic[self._operation] += outgoing.nbytes
        try:
            self.mpi.Sendrecv(
                [outgoing, MPI.BYTE], self.right, tag, [incoming, MPI.BYTE], self.left, MPI.ANY_TAG, status
            )
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self._fail(f"rank {self.left} sent more than the {incoming.nbytes} bytes that rank {self.rank} "
                       f"expects in {self._doing(tag)}: the ranks' arrays differ in size or dtype")  # fmt: skip
        if status.Get_tag() != tag or status.Get_count(MPI.BYTE) != incoming.nbytes:
            self._explain(tag, status.Get_tag(), status.Get_count(MPI.BYTE), incoming.nbytes)
        if not isinstance(recv, np.ndarray):
            recv.view(np.uint8).reshape(-1).set(incoming)

    def scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """An array (count,) of `dtype` whose memory is used again by the next call."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = xp.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    @contextmanager
    def label(self, operation: str = "", unit: int = -1, names: Sequence[str] = ()) -> Iterator[None]:
        """Messages inside say that they belong to `operation` and to unit number `unit` of those called `names`.

        The outermost operation wins: an all-reduce stays one when it calls reduce-scatter.
        """
        before = self._operation, self._unit, self._names
        if operation and self._operation == "exchange":
            self._operation = operation
        if unit >= 0:
            if unit >= self._most_units:
                raise ValueError(f"{unit + 1} units are more than the {self._most_units} that this MPI's tags can name")
            self._unit, self._names = unit + 1, names
        try:
            yield
        finally:
            self._operation, self._unit, self._names = before

    def _to_mpi(self, array: Array) -> np.ndarray[Any, Any]:
        """The bytes of `array` where MPI can read and write them."""
        if not array.flags.c_contiguous:
            raise ValueError(
                f"rank {self.rank}: {self._operation} needs a contiguous array, this one has shape {array.shape} and "
                f"strides {array.strides}: pass numpy.ascontiguousarray(...) of it"
            )
        if isinstance(array, np.ndarray):
            return array.reshape(-1).view(np.uint8)
        xp.cuda.get_current_stream().synchronize()  # MPI does not know of streams
        return backend.to_host(array.reshape(-1).view(np.uint8))

    # What follows is about ranks that do not do the same. Training never comes here.

    def _doing(self, tag: int) -> str:
        unit, operation = divmod(tag - FIRST_TAG, len(OPERATIONS))
        name = self._names[unit - 1] if 0 < unit <= len(self._names) else f"unit {unit - 1}"
        return OPERATIONS[operation] + (f" of {name}" if unit else "")

    def _explain(self, mine: int, theirs: int, got: int, wanted: int) -> NoReturn:
        """Raise for a message that is not the expected one."""
        if theirs == FAILED:
            text = bytearray(REASON_BYTES)
            self.mpi.Recv([text, MPI.BYTE], self.left, REASON)
            self._fail(text.rstrip(b"\0").decode(errors="replace"), first=False)
        if theirs == LEFT:
            self._fail(f"rank {self.left} has ended its program, but rank {self.rank} waits for it in {self._doing(mine)}: "
                       "every rank must take part in every collective")  # fmt: skip
        if theirs == mine:
            self._fail(f"rank {self.left} sent {got} bytes, but rank {self.rank} expects {wanted} in {self._doing(mine)}: "
                       "the ranks' arrays differ in size or dtype")  # fmt: skip
        self._fail(f"rank {self.left} is in {self._doing(theirs)}, but rank {self.rank} is in {self._doing(mine)}: "
                   "every rank must call the same collectives in the same order")  # fmt: skip

    def _fail(self, reason: str, first: bool = True) -> NoReturn:
        """Tell the right neighbour; whoever is `first` also takes what the left one still sends; then raise."""
        self._broken = reason
        text = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        news = [self.mpi.Isend([b"", MPI.BYTE], self.right, FAILED), self.mpi.Isend([text, MPI.BYTE], self.right, REASON)]
        end = time.monotonic() + PATIENCE
        while first and time.monotonic() < end and _drain(self.mpi, self.left) not in (FAILED, LEFT):
            time.sleep(0.001)
        while not MPI.Request.Testall(news) and time.monotonic() < end:
            time.sleep(0.001)
        raise CollectiveError(reason)

    def _everyone(self) -> None:
        """Return when every rank has come here: one message goes round the ring N - 1 times."""
        token = np.zeros(1, np.uint8)
        with self.label("control"):
            for _ in range(self.size - 1):
                self.exchange(token, token.copy())

    @staticmethod
    def _meet(mpi: MPI.Comm) -> None:
        """Wait for the left neighbour before a collective call of MPI, which would wait for ever if it had ended."""
        if mpi.size == 1:
            return
        left = (mpi.rank - 1) % mpi.size
        hello = mpi.Isend([b"", MPI.BYTE], (mpi.rank + 1) % mpi.size, WORLD_HELLO)
        while not mpi.Iprobe(left, WORLD_HELLO):
            if mpi.Iprobe(left, WORLD_LEFT):
                raise CollectiveError(f"rank {left} ended its program before it made its Communicator")
            time.sleep(0.0005)
        mpi.Recv([bytearray(0), MPI.BYTE], left, WORLD_HELLO)
        hello.Wait()

    @staticmethod
    def _check_launcher() -> None:
        """Refuse to be N times rank 0 of 1: what happens under a launcher of another MPI than the library's."""
        started = launched_ranks()
        if MPI.COMM_WORLD.size == 1 and started > 1:
            library = MPI.Get_library_version().splitlines()[0].strip("\0 ,")
            raise RuntimeError(
                f"the launcher started {started} processes, but each of them is rank 0 of 1: mpirun (or srun) belongs to "
                f"another MPI than the library that mpi4py loaded, which is {library}. Put the bin directory of that MPI "
                "first on PATH (source .venv/bin/activate), or point MPI4PY_LIBMPI at the launcher's libmpi.so; "
                "`python -m minizero doctor` shows both"
            )


def launched_ranks() -> int:
    """How many processes the launcher says it has started, by its environment variables; 1 if it says nothing."""
    variables = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    return max((int(os.environ[name]) for name in variables if os.environ.get(name, "").isdigit()), default=1)


def _drain(mpi: MPI.Comm, source: int) -> int:
    """Receive and forget one message from `source` if there is one. Returns its tag, -1 for none."""
    status = MPI.Status()
    if not mpi.Iprobe(source, MPI.ANY_TAG, status):
        return -1
    mpi.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE], source, status.Get_tag())
    return int(status.Get_tag())


def _farewell() -> None:
    """At exit: tell every right neighbour LEFT, and wait for it from every left one."""
    for mpi, left_tag in _parted:
        mpi.Isend([b"", MPI.BYTE], (mpi.rank + 1) % mpi.size, left_tag)
    for mpi, left_tag in _parted:
        left = (mpi.rank - 1) % mpi.size
        if left_tag == WORLD_LEFT:
            while not mpi.Iprobe(left, left_tag):
                time.sleep(0.001)
            mpi.Recv([bytearray(0), MPI.BYTE], left, left_tag)
        else:
            while _drain(mpi, left) != left_tag:
                time.sleep(0.001)


def _abort(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Print the traceback, each line with this rank's number, and end the whole job."""
    world = MPI.COMM_WORLD
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    sys.stdout.flush()
    sys.stderr.write("".join(f"[rank {world.rank}/{world.size}] {line}\n" for line in lines))
    sys.stderr.flush()
    world.Abort(1)


def _abort_from_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        _abort(args.exc_type, args.exc_value, args.exc_traceback)


if MPI.COMM_WORLD.size > 1:
    sys.excepthook = _abort
    threading.excepthook = _abort_from_thread
    _parted.append((MPI.COMM_WORLD, WORLD_LEFT))
    atexit.register(_farewell)
