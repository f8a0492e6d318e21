"""How do the bytes of an array reach MPI?

    host array                        MPI reads and writes it where it is
    GPU array, CUDA-aware MPI         the same: MPI is handed the GPU's own memory
    GPU array, any other MPI          through pinned host memory, which stays and is used again:

        GPU --copy--> pinned --MPI--> ... --MPI--> pinned --copy--> GPU

A GPU works through a stream of orders on its own, and MPI knows nothing of streams. So before each call of MPI we wait
until the GPU has done all that it was told (`settle`): what is sent has then been computed, and nothing that was
computed from the array to receive into is still to come. Forgotten, that gives wrong numbers now and then.

An MPI that is not CUDA-aware ends in a segmentation fault where it is handed GPU memory. That it is, MPI says in one of
several ways, or not at all: then it is taken not to be.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from . import backend
from .backend import Array, to_host, xp
from .job import MPI as MPI

HostArray = np.ndarray[Any, Any]
LARGEST = 2**30  # bytes in one message: older MPIs count to 2^31
STAGED = 2**26  # bytes in one message through pinned memory, of which a communicator keeps twice as many
FORCE = "MINIZERO_MPI_CUDA"


@cache
def cuda_aware() -> tuple[bool, str]:
    """Can the MPI that is loaded read and write GPU memory? And who says so?

    Raises ValueError where MINIZERO_MPI_CUDA is neither 0 nor 1.
    """
    said = os.environ.get(FORCE, "")
    if said:
        if said not in ("0", "1"):
            raise ValueError(f"{FORCE}={said!r}: set it to 1 if your MPI can read GPU memory, to 0 if it cannot")
        return said == "1", f"{FORCE}={said}"
    for name, asked in QUESTIONS.items():
        if asked():
            return True, name
    return False, f"none of {', '.join(QUESTIONS)} says so"


def _if_known(question: Callable[[], bool]) -> Callable[[], bool]:
    """A question to MPI, to which the answer is no where it has never heard of it."""

    def ask() -> bool:
        try:
            return question()
        except (AttributeError, OSError, MPI.Exception):  # no such function, no such file, no such key
            return False

    return ask


def _library() -> ctypes.CDLL:
    """MPI's own functions. MPI.__file__ is linked against them; the program itself cannot see them."""
    return ctypes.CDLL(MPI.__file__)


@_if_known
def _query() -> bool:
    return bool(_library().MPIX_Query_cuda_support())


@_if_known
def _gpu_query() -> bool:
    cuda, found = 0, ctypes.c_int(0)  # MPIX_GPU_SUPPORT_CUDA is 0
    return _library().MPIX_GPU_query_support(cuda, ctypes.byref(found)) == MPI.SUCCESS and bool(found.value)


@_if_known
def _memory_kinds() -> bool:
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return "cuda" in [kind.split(":")[0].strip() for kind in kinds.split(",")]


QUESTIONS: dict[str, Callable[[], bool]] = {
    "MPIX_Query_cuda_support": _query,
    "MPIX_GPU_query_support": _gpu_query,
    "mpi_memory_alloc_kinds": _memory_kinds,
    "MPICH_GPU_SUPPORT_ENABLED": lambda: os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1",  # Cray's
}
EMPTY = np.empty(0, np.uint8)


class Transport:
    """The way of messages through host memory as it is. Messages are bytes: 1-axis arrays of uint8."""

    largest = LARGEST

    def outgoing(self, message: Array) -> Array:
        """Where MPI can read `message`. Called immediately before it does."""
        return message

    def lasting(self, message: Array) -> Array:
        """The same, for as long as MPI likes: what is sent meanwhile must not take its place."""
        return self.outgoing(message)

    def incoming(self, message: Array) -> Array:
        """Where MPI can write `message`. Called immediately before it does."""
        return message

    def arrived(self, landed: Array, message: Array) -> None:
        """MPI has written `landed`, which `incoming` gave: now fill `message`."""

    def abandon(self) -> None:
        """A message went astray: MPI may go on reading what `outgoing` gave last."""


class Direct(Transport):
    """GPU memory is handed to MPI. Host arrays go this way, too: numbers on which ranks agree.

    `patient`: are there more ranks than cores? Then whoever waits for the GPU sleeps, since asking takes a core.
    """

    def __init__(self, patient: bool) -> None:
        self._event = xp.cuda.Event(block=patient, disable_timing=True)

    def settle(self) -> None:
        """Wait until the GPU has done all that the current stream was told."""
        self._event.record()
        self._event.synchronize()

    def outgoing(self, message: Array) -> Array:
        if isinstance(message, np.ndarray):
            return message
        self.settle()
        return message if message.size else EMPTY  # an empty GPU array has no address

    incoming = outgoing


class Staged(Direct):
    """GPU memory is copied to pinned host memory and back, and MPI is handed that."""

    largest = STAGED

    def __init__(self, patient: bool) -> None:
        super().__init__(patient)
        self._copied = xp.cuda.Event(block=patient, disable_timing=True)  # the last copy back to the GPU
        self._pinned: dict[str, HostArray] = {}

    def pinned(self, key: str, count: int) -> HostArray:
        """Pinned memory of `count` bytes, the same at each call as far as it is large enough."""
        if key not in self._pinned or self._pinned[key].size < count:
            import cupyx

            self._pinned[key] = cupyx.empty_pinned(count, np.uint8)
        return self._pinned[key][:count]

    def outgoing(self, message: Array) -> Array:
        if isinstance(message, np.ndarray) or not message.size:
            return message if message.size else EMPTY
        host = self.pinned("out", message.size)
        message.get(out=host, blocking=False)
        self.settle()
        return host

    def lasting(self, message: Array) -> Array:
        return message if isinstance(message, np.ndarray) else to_host(message)

    def incoming(self, message: Array) -> Array:
        if isinstance(message, np.ndarray) or not message.size:
            return message if message.size else EMPTY
        self._copied.synchronize()  # the last message may still be on its way from there to the GPU
        return self.pinned("in", message.size)

    def arrived(self, landed: Array, message: Array) -> None:
        if landed is not message and landed.size:
            message.set(landed)
            self._copied.record()

    def abandon(self) -> None:
        self._pinned = {}

    def __del__(self) -> None:
        with suppress(Exception):  # at the very end, there may be no GPU to wait for
            self._copied.synchronize()  # before that memory becomes somebody else's


def transport(patient: bool) -> Transport:
    """The way for one communicator: threads with communicators of their own must not meet in pinned memory."""
    if backend.name == "numpy":
        return Transport()
    return Direct(patient) if cuda_aware()[0] else Staged(patient)


def message(array: Array, what: str) -> Array:
    """The bytes of `array`, as a view. Raises ValueError, naming `what` is done, where they do not lie in order."""
    if not array.flags.c_contiguous:
        where = f"{what}: shape {array.shape} with strides {array.strides}"
        raise ValueError(f"{where} is not contiguous: pass numpy.ascontiguousarray(...) of it")
    return array.reshape(-1).view(np.uint8)


def check_target(outgoing: Array, incoming: Array, what: str) -> None:
    """Raise ValueError where `incoming` cannot be received into while `outgoing` is sent."""
    host = isinstance(incoming, np.ndarray)
    locked = host and not incoming.flags.writeable
    library = np if host else xp
    if locked or (isinstance(outgoing, type(incoming)) and library.may_share_memory(outgoing, incoming)):
        raise ValueError(f"{what}: the array to receive into is read-only or overlaps the one to send")
