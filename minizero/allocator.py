"""Who allocates arrays, how many bytes are alive, and how is an allocation refused?

Nothing is counted by hand: the allocator itself is asked. It tells every listener of each array before the array
exists, and a listener may refuse it. What is alive comes with the stack of Python lines that asked for it.

Under NumPy, arrays get their memory from a handler that can be exchanged (NEP 49). Ours asks the listeners, and
returns NULL to refuse, which NumPy turns into a MemoryError at that very line. What is alive is known by
`tracemalloc`, to which NumPy reports its arrays; Python's own objects are kept out of it. Under CuPy, the same two
facts come from the memory pool's hooks.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from .backend import name, xp

DEPTH = 16  # lines of a stack that are kept, the innermost ones: enough to see what an array is for
Stack = tracemalloc.Traceback  # file and line of each frame, outermost first
Listener = Callable[[int, FrameType | None], bool]  # hears the bytes that a frame is about to get; False refuses them


class Block(NamedTuple):
    """One live allocation: its bytes, and who asked for it, as a hashable sequence of tracemalloc's frames."""

    size: int
    stack: Stack


def stack(frame: FrameType | None) -> Stack:
    """The lines that are running in a frame and its callers."""
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < DEPTH:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tracemalloc.Traceback(tuple(lines))


class Watch:
    """Tells listeners of allocations, from `listen` to `leave`. Arrays that are older are not seen."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.older: dict[int, weakref.ref[Any]] = {}  # arrays from before the first listener, which count all the same
        self.older_bytes = 0
        self.fault: BaseException | None = None  # what a listener raised
        self.thread = 0
        self.refused = False
        self.ignored: Any = ()  # the engines that the first listener does not count

    def count(self, array: Any) -> None:
        """From now on, `array`, which is older than the first listener, counts until it dies."""

        def died(ref: Any, key: int = id(array), size: int = array.nbytes) -> None:
            if self.older.get(key) is ref:
                del self.older[key]
                self.older_bytes -= size

        if id(array) not in self.older:
            self.older[id(array)] = weakref.ref(array, died)
            self.older_bytes += array.nbytes

    def listen(self, listener: Listener) -> None:
        thread = threading.get_ident()
        if not self.listeners:
            try:
                self.start()
            except BaseException:
                self.forget()
                raise
            self.thread = thread
        elif thread != self.thread:
            raise RuntimeError("memory is being measured, or limited, in another thread: one at a time")
        self.listeners.append(listener)

    def forget(self) -> None:
        """Count nothing that is older."""
        self.older.clear()
        self.older_bytes = 0

    def leave(self, listener: Listener) -> None:
        self.listeners.remove(listener)
        if not self.listeners:
            self.stop()
            self.forget()
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def allowed(self, size: int) -> bool:
        frame = sys._getframe(2)  # of whoever asked: our caller is what the allocator calls
        try:
            verdicts = [listener(size, frame) for listener in self.listeners]
        except BaseException as fault:  # which cannot pass through the allocator: refuse, and raise it in `leave`
            self.fault, verdicts = self.fault or fault, [False]
        self.refused = self.refused or not all(verdicts)
        return all(verdicts)

    def tell_full(self, size: int, frame: FrameType | None) -> None:
        """The allocator itself has refused: tell those who gave it a limit."""
        try:
            for listener in self.listeners:
                listener.__self__.full(size, frame)  # type: ignore[attr-defined]
        except BaseException as fault:  # the allocator's own error must leave it
            self.fault = self.fault or fault

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def limit(self, nbytes: int) -> bool:
        """Let the allocator itself refuse what crosses so many bytes; 0: no more. False where listeners must do it.

        Where it refuses, the method `full` of the listeners' object is called, as the listeners are.
        """
        return False

    def live(self) -> int:
        """Bytes of all live arrays that were allocated since the first listener came."""
        return sum(block.size for block in self.blocks())

    def blocks(self) -> Iterator[Block]:
        raise NotImplementedError


class _Allocator(ctypes.Structure):
    """Python's PyMemAllocatorEx, and the tail of NumPy's PyDataMem_Handler: a context and four functions."""

    _fields_ = [(field, ctypes.c_void_p) for field in ("ctx", "malloc", "calloc", "realloc", "free")]


class _Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator)]


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_MALLOC = ctypes.PYFUNCTYPE(_pointer, _pointer, _size)
_CALLOC = ctypes.PYFUNCTYPE(_pointer, _pointer, _size, _size)
_REALLOC = ctypes.PYFUNCTYPE(_pointer, _pointer, _pointer, _size)
_SET_HANDLER, _GET_HANDLER = 304, 305  # their places in NumPy's table of C functions


class NumpyWatch(Watch):
    """Arrays in host memory. One thread's: others keep NumPy's own handler."""

    def __init__(self) -> None:
        super().__init__()
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = _pointer
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_New.argtypes = [_pointer, ctypes.c_char_p, _pointer]
        api.PyTraceMalloc_Untrack.argtypes = [ctypes.c_uint, ctypes.c_size_t]
        for function in (api.PyMem_GetAllocator, api.PyMem_SetAllocator):
            function.argtypes, function.restype = [ctypes.c_int, _pointer], None
        table = api.PyCapsule_GetPointer(np._core._multiarray_umath._ARRAY_API, None)  # type: ignore[attr-defined]
        functions = ctypes.cast(table, ctypes.POINTER(_pointer))
        get = ctypes.PYFUNCTYPE(ctypes.py_object)(functions[_GET_HANDLER] or 0)
        self._set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[_SET_HANDLER] or 0)

        old = _Handler.from_address(api.PyCapsule_GetPointer(get(), b"mem_handler"))
        malloc, calloc = _MALLOC(old.allocator.malloc), _CALLOC(old.allocator.calloc)
        realloc = _REALLOC(old.allocator.realloc)
        mine = (
            _MALLOC(lambda ctx, size: malloc(ctx, size) if self.allowed(size) else None),
            _CALLOC(lambda ctx, n, size: calloc(ctx, n, size) if self.allowed(n * size) else None),
            _REALLOC(lambda ctx, old, size: realloc(ctx, old, size) if self.allowed(size) else None),
        )
        addresses = [ctypes.cast(function, _pointer).value for function in mine]
        allocator = _Allocator(old.allocator.ctx, *addresses, old.allocator.free)  # free is called amid exceptions
        handler = _Handler(b"minizero", old.version, allocator)
        self._capsule = api.PyCapsule_New(ctypes.addressof(handler), b"mem_handler", None)
        self._kept = mine, handler, malloc, calloc, realloc  # arrays that outlive the watch come back to these

    def start(self) -> None:
        if tracemalloc.is_tracing():
            raise RuntimeError("measuring memory needs tracemalloc for itself: call tracemalloc.stop() first")
        api = ctypes.pythonapi
        python = [_Allocator() for _ in range(3)]  # how Python's raw memory, buffers and objects are allocated
        for domain, each in enumerate(python):
            api.PyMem_GetAllocator(domain, ctypes.byref(each))
        tracemalloc.start(DEPTH)
        for domain, each in enumerate(python):  # as before: of Python's objects tracemalloc shall not hear
            api.PyMem_SetAllocator(domain, ctypes.byref(each))
        self._base = tracemalloc.get_traced_memory()[0]
        self._before = self._set(self._capsule)

    def settle(self) -> None:
        """NumPy reports a refused array, too: as one at address 0."""
        if self.refused:
            self.refused = False
            ctypes.pythonapi.PyTraceMalloc_Untrack(np.lib.tracemalloc_domain, 0)

    def stop(self) -> None:
        self._set(self._before)
        tracemalloc.stop()

    def live(self) -> int:
        self.settle()
        return tracemalloc.get_traced_memory()[0] - self._base

    def blocks(self) -> Iterator[Block]:
        self.settle()
        for trace in tracemalloc.take_snapshot().traces:
            if trace.domain == np.lib.tracemalloc_domain:
                yield Block(trace.size, trace.traceback)


def cupy_watch() -> Watch:
    """The same for arrays on this rank's GPU; sizes are those of the pool, which rounds up to 512 bytes."""

    class Hook(xp.cuda.MemoryHook, Watch):  # type: ignore[misc, name-defined]
        name = "minizero"

        def __init__(self) -> None:
            Watch.__init__(self)
            self.held: dict[int, Block] = {}
            self.bytes = 0
            self.limits: list[int] = []

        def start(self) -> None:
            self.held.clear()
            self.bytes = 0
            self.__enter__()

        def stop(self) -> None:
            self.__exit__(None, None, None)

        def limit(self, nbytes: int) -> bool:
            gc.collect()  # what dies later would leave more room than there is
            pool = xp.get_default_memory_pool()
            pool.free_all_blocks()
            if nbytes:  # ... of arrays that count; all others have their memory already
                self.limits.append(nbytes + pool.total_bytes() - self.live() - self.older_bytes)
            else:
                self.limits.pop()
            pool.set_limit(size=self.limits[-1] if self.limits else 0)
            return True

        def malloc_preprocess(self, **facts: Any) -> None:
            if not self.allowed(facts["mem_size"]):
                raise MemoryError("refused")

        def malloc_postprocess(self, **facts: Any) -> None:
            frame, size = sys._getframe(1), facts["mem_size"]
            if facts["mem_ptr"]:
                self.held[facts["mem_ptr"]] = Block(size, stack(frame))
                self.bytes += size
            elif size:
                self.tell_full(size, frame)

        def free_postprocess(self, **facts: Any) -> None:
            if self.held.pop(facts["mem_ptr"], None):
                self.bytes -= facts["mem_size"]

        def live(self) -> int:
            return self.bytes

        def blocks(self) -> Iterator[Block]:
            return iter(list(self.held.values()))

    return Hook()


_watch: Watch | None = None


def watch() -> Watch:
    """This process's watch, the same at each call."""
    global _watch
    if _watch is None:
        _watch = NumpyWatch() if name == "numpy" else cupy_watch()
    return _watch
