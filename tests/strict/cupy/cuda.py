"""The device of the stand-in: its stream of orders, its memory pool, its events. See cupy/__init__.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

GRAIN = int(os.environ.get("STRICT_GRAIN", "512"))  # bytes; the pool rounds up to multiples of it
DEVICES = int(os.environ.get("STRICT_DEVICES", "2"))


class Fault(RuntimeError):  # noqa: N818
    """What would be wrong, now and then or always, with a real GPU. Nobody must catch it."""


class DeviceSynchronized(RuntimeError):  # noqa: N818
    """The program waited for the device where that is not allowed."""


class Clock:
    """A device works through its orders later. So does this one, with copies to pinned memory.

    Attributes:
        given, done: numbers of the last order that was given, and of the last one that somebody has waited for.
        reads: how often the program waited for a value.
        busy: pinned memory that copies in flight read or write, (first, last address, number of the order).
    """

    def __init__(self) -> None:
        self.given = self.done = self.reads = 0
        self.allowed = True
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.busy: list[tuple[int, int, int]] = []

    @property
    def pending(self) -> int:
        return self.given - self.done

    def order(self) -> None:
        self.given += 1

    def wait(self, number: int) -> None:
        """Until order `number` has been done."""
        self.done = max(self.done, number)
        for due, copy in self.later:
            if due <= number:
                copy()
        self.later = [(due, copy) for due, copy in self.later if due > number]
        self.busy = [each for each in self.busy if each[2] > number]

    def read(self) -> None:
        """The program waits for a value."""
        if not self.allowed:
            raise DeviceSynchronized("the program waits for a value of the device where that is not allowed")
        self.reads += 1
        self.wait(self.given)

    def take(self, host: np.ndarray[Any, Any]) -> None:
        """A copy that was just ordered reads or writes `host`."""
        first = host.ctypes.data
        self.busy.append((first, first + host.nbytes, self.given))

    def in_flight(self, address: int, nbytes: int) -> bool:
        return any(address < last and first < address + nbytes for first, last, _ in self.busy)


clock = Clock()


class Stream:
    """The only stream there is."""

    ptr = 0

    def synchronize(self) -> None:
        clock.wait(clock.given)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        self.number = clock.given

    def synchronize(self) -> None:
        clock.wait(self.number)

    @property
    def done(self) -> bool:
        return self.number <= clock.done


Stream.null = Stream()  # type: ignore[attr-defined]


def get_current_stream() -> Stream:
    return Stream.null  # type: ignore[attr-defined]


class Device:
    current = 0

    def __init__(self, device: int | None = None) -> None:
        self.id = Device.current if device is None else int(device)
        if not 0 <= self.id < DEVICES:
            raise ValueError(f"cudaErrorInvalidDevice: device {self.id} of {DEVICES}")

    def use(self) -> None:
        Device.current = self.id

    def synchronize(self) -> None:
        clock.wait(clock.given)

    compute_capability = "75"
    mem_info = (15 << 30, 16 << 30)


def is_available() -> bool:
    return DEVICES > 0


runtime = SimpleNamespace(
    getDeviceCount=lambda: DEVICES,
    getDevice=lambda: Device.current,
    getDeviceProperties=lambda number: {"name": b"strict stand-in on host memory", "totalGlobalMem": 16 << 30},
    runtimeGetVersion=lambda: 12090,
    driverGetVersion=lambda: 12090,
    memGetInfo=lambda: Device.mem_info,
)
hooks: dict[str, MemoryHook] = {}


class MemoryHook:
    name = "MemoryHook"

    def __enter__(self) -> MemoryHook:
        if self.name in hooks:
            raise KeyError(f"memory hook {self.name} already exists")
        hooks[self.name] = self
        return self

    def __exit__(self, *_: Any) -> None:
        del hooks[self.name]

    def malloc_preprocess(self, **facts: Any) -> None: ...

    def malloc_postprocess(self, **facts: Any) -> None: ...

    def free_preprocess(self, **facts: Any) -> None: ...

    def free_postprocess(self, **facts: Any) -> None: ...


class OutOfMemoryError(MemoryError):
    pass


class MemoryPool:
    """Counts bytes; the memory is NumPy's."""

    def __init__(self) -> None:
        self.used = self.limit = 0

    def used_bytes(self) -> int:
        return self.used

    total_bytes = used_bytes  # it keeps no free blocks

    def free_all_blocks(self, stream: Stream | None = None) -> None: ...

    def get_limit(self) -> int:
        return self.limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self.limit = size or 0


pool = MemoryPool()


class Chunk:
    """Memory of the device, as long as somebody holds this."""

    __slots__ = ("held", "size")

    def __init__(self, size: int) -> None:
        self.held, self.size = False, -(-size // GRAIN) * GRAIN
        facts = {"device_id": Device.current, "size": size, "mem_size": self.size} if hooks else {}
        for hook in list(hooks.values()):
            hook.malloc_preprocess(**facts)
        full = pool.limit and pool.used + self.size > pool.limit
        if not full:
            pool.used += self.size
            self.held = True
        for hook in list(hooks.values()):
            hook.malloc_postprocess(**facts, mem_ptr=0 if full else id(self), pmem_id=id(self))
        if full:
            raise OutOfMemoryError(
                f"Out of memory allocating {size:,} bytes (allocated so far: {pool.used:,} bytes, "
                f"limit set to: {pool.limit:,} bytes)."
            )

    def __del__(self) -> None:
        if not self.held:
            return
        pool.used -= self.size
        if hooks and not sys.is_finalizing():
            facts = {"device_id": 0, "mem_size": self.size, "mem_ptr": id(self), "pmem_id": id(self)}
            for hook in list(hooks.values()):
                hook.free_preprocess(**facts)
                hook.free_postprocess(**facts)
