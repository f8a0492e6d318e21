"""A strict stand-in for CuPy on host memory: a test double, found as `cupy` where tests/strict is on PYTHONPATH.

    MINIZERO_BACKEND=cupy PYTHONPATH=tests/strict python -m pytest

It has the names and keywords that CuPy has (tests/cupy_names.txt) and computes with NumPy. It refuses what a real GPU
refuses, and what it does not refuse but should:

- to turn an array into one of NumPy, or to mix both, unless that is asked for: `asarray`, `get`, `asnumpy`;
- names and keywords that CuPy lacks, reductions of empty arrays without an identity, arithmetic with bfloat16;
- an MPI call with work that nobody has waited for, and GPU memory in the hands of an MPI that is not CUDA-aware
  (STRICT_CUDA_AWARE=1: it is), on the way through pinned memory, too;
- arrays of another device, assignments to the same element twice, and functions whose bits differ from run to run.

Copies to pinned memory are late: until they are waited for, there is rubbish. Waiting for a value is counted (`clock`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import cuda, mpi
from .cuda import Chunk, Device, Fault, clock, pool

Host = Any  # a NumPy array
__version__ = "14.2.0"
bfloat16 = np.dtype(ml_dtypes.bfloat16)
SUPPORTED = "?bhilqBHILQefdFD"  # dtypes by their letters, and bfloat16
READING = {"nonzero", "flatnonzero", "argwhere", "unique", "compress", "extract"}  # the result's size is a value
UNSTEADY = {"cumsum", "cumprod", "nancumsum", "nancumprod", "bincount", "histogram", "put", "place"}
WITHOUT_IDENTITY = {"max", "min", "amax", "amin", "argmax", "argmin"}
METHODS = (
    "all", "any", "argmax", "argmin", "conj", "copy", "cumprod", "cumsum", "diagonal", "dot", "fill", "flatten", "max",
    "mean", "min", "nonzero", "prod", "put", "ravel", "repeat", "reshape", "round", "searchsorted", "squeeze", "std",
    "sum", "swapaxes", "take", "trace", "transpose", "var", "view",
)  # fmt: skip
AWARE = os.environ.get("STRICT_CUDA_AWARE") == "1"


def names() -> dict[str, set[str] | None]:
    """Each name that CuPy has, with its keywords; None where it takes any or is no function."""
    found: dict[str, set[str] | None] = {}
    for line in (Path(__file__).parents[2] / "cupy_names.txt").read_text(encoding="utf-8").splitlines():
        name, bracket, given = line.partition("(")
        keywords = {part.strip() for part in given.rstrip(")").split(",")}
        found[name] = keywords if bracket and "**" not in keywords else None
    return found


NAMES = names()


def order(arrays: list[ndarray]) -> None:
    """The device is told to do something with arrays, which must be its own."""
    for array in arrays:
        if array._device != Device.current:
            raise Fault(f"array of device {array._device} used while device {Device.current} is current")
    clock.given += 1


def host(thing: Any, arrays: list[ndarray]) -> Any:
    """What NumPy is given for an argument; its arrays are noted."""
    kind = type(thing)
    if kind is ndarray:
        arrays.append(thing)
        return thing._a
    if kind is np.ndarray:
        raise TypeError(f"Unsupported type {kind}: an array of the host among those of the device")
    if kind is list or kind is tuple:
        return kind([host(each, arrays) for each in thing])
    return thing


def root(array: Host) -> Host:
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def device_array(found: Any, sources: Any = ()) -> Any:
    """A result of NumPy's as an array of the device: a view of a source's memory, or in memory of its own."""
    if isinstance(found, tuple):
        return tuple(device_array(each, sources) for each in found)
    a = found if type(found) is np.ndarray else np.asarray(found)
    if a.dtype.char not in SUPPORTED and a.dtype != bfloat16:
        raise ValueError(f"Unsupported dtype {a.dtype}")
    array = ndarray.__new__(ndarray)
    array._a, array._device, array.base = a, Device.current, None
    if a.base is not None:
        owner = root(a)
        for source in sources:
            if source._a is owner or root(source._a) is owner:
                array._chunk, array.base = source._chunk, source if source.base is None else source.base
                return array
    array._chunk = Chunk(a.nbytes) if a.nbytes else None
    return array


class Known:
    """What is known of a function: its keywords (None: any), and what about it is different on a GPU."""

    def __init__(self, name: str, place: str, function: Callable[..., Any]) -> None:
        self.full = f"{place}.{name}"
        if self.full not in NAMES:
            raise AttributeError(f"CuPy has no {self.full}")
        if name in UNSTEADY:
            raise Fault(f"{name} of a GPU has other bits from run to run")
        self.keywords, self.reads, self.without_identity = NAMES[self.full], name in READING, name in WITHOUT_IDENTITY
        self.computes = isinstance(function, np.ufunc) or name in ("sum", "mean", "prod", "where", *WITHOUT_IDENTITY)
        self.plain = name in ("add", "subtract", "multiply", "equal")


known = functools.cache(Known)


def call(name: str, function: Callable[..., Any], args: Any, keywords: Any, place: str = "cupy") -> Any:
    """Run a function of NumPy's as the device would."""
    facts, out = known(name, place, function), None
    arrays: list[ndarray] = []
    given = [host(each, arrays) for each in args]
    if keywords:
        if facts.keywords is not None and not facts.keywords.issuperset(keywords):
            raise TypeError(f"{facts.full} has no keyword {', '.join(set(keywords) - facts.keywords)}")
        out = keywords.pop("out", None)
        keywords = {key: host(each, arrays) for key, each in keywords.items()}
    if facts.without_identity and any(array.size == 0 for array in arrays):
        raise ValueError(f"zero-size array to reduction operation cupy_{name} which has no identity")
    if facts.computes:
        narrow = [array._a.dtype == bfloat16 for array in arrays]
        if any(narrow) and not (facts.plain and narrow == [True, True]):
            raise Fault(f"{name} of bfloat16: not what NumPy computes; cast to float32 first")
    if facts.reads or (name == "where" and len(args) == 1):
        clock.read()
    if out is not None:
        if type(out) is not ndarray:
            raise TypeError(f"out= must be an array of the device, not {type(out)}")
        order([*arrays, out])
        function(*given, out=out._a, **keywords)
        return out
    order(arrays)
    found = function(*given, **keywords)
    return None if found is None else device_array(found, arrays)  # copyto gives nothing


def method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    @functools.wraps(function)
    def run(self: ndarray, *args: Any, **keywords: Any) -> Any:
        return call(name, function, (self, *args), keywords, "cupy.ndarray")

    return run


def operator(name: str, swapped: bool = False, in_place: bool = False) -> Callable[..., Any]:
    """x + y, y + x or x += y; None of them with an array of the host."""
    function = getattr(np, name)

    def run(self: ndarray, *others: Any) -> Any:
        for other in others:
            if getattr(other, "__array_ufunc__", self) is None:
                return NotImplemented
        args = (*others, self) if swapped else (self, *others)
        return call(name, function, args, {"out": self} if in_place else {})

    return run


class Flags:
    """All that CuPy knows of an array's memory."""

    def __init__(self, c: bool, f: bool, own: bool) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = c, f, own


class ndarray:  # noqa: N801
    """An array of the device."""

    __slots__ = ("__weakref__", "_a", "_chunk", "_device", "base")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    _a: Host
    _chunk: Chunk | None
    _device: int
    base: ndarray | None

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, kind: str, *args: Any, **keywords: Any) -> Any:
        if kind != "__call__":
            raise Fault(f"numpy.{ufunc.__name__}.{kind} of a device array")
        return call(ufunc.__name__, ufunc, args, keywords)  # a number of NumPy's on the left

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} of a device array: say xp.{function.__name__}")

    shape = property(lambda self: self._a.shape)
    strides = property(lambda self: self._a.strides)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    T = property(lambda self: self.transpose())
    device = property(lambda self: Device(self._device))

    @property
    def flags(self) -> Flags:
        return Flags(self._a.flags.c_contiguous, self._a.flags.f_contiguous, self.base is None)

    @property
    def data(self) -> Any:
        return type("MemoryPointer", (), {"ptr": self._a.ctypes.data if self.size else 0})

    # Values reach the host here, and only here.

    def get(self, stream: Any = None, order: str = "C", out: Host = None, blocking: bool = True) -> Host:
        clock.order()
        if not blocking:
            if not isinstance(out, np.ndarray) or out.dtype != self.dtype or out.shape != self.shape:
                raise TypeError("get: out must be a NumPy array of the same dtype and shape")
            if clock.in_flight(out.ctypes.data, out.nbytes):
                raise Fault("pinned memory was used again before a copy from or to it was waited for")
            out.reshape(-1).view(np.uint8)[:] = 0xAB
            source = self._a
            clock.later.append((clock.given, lambda: out.__setitem__(..., source)))
            clock.take(out)
            return out
        clock.read()
        if out is not None:
            out[...] = self._a
        return self._a.copy(order) if out is None else out

    def set(self, arr: Host, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError("set: needs a NumPy array of the same dtype and shape")
        order([self])
        self._a[...] = arr
        clock.take(arr)

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __reduce__(self) -> Any:
        return array, (self.get(),)

    # mpi4py asks for memory here.

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device  # kDLCUDA

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if not AWARE:
            raise Fault("GPU memory was handed to an MPI that is not CUDA-aware: a segmentation fault")
        if clock.pending and self.size:
            raise Fault(f"MPI was handed GPU memory while {clock.pending} orders were not waited for: wrong numbers")
        capsule = self._a.__dlpack__(max_version=max_version)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        versioned = "dltensor_versioned" in repr(capsule)  # then version, context, deleter and flags come first
        tensor = pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor") + 32 * versioned
        ctypes.c_int32.from_address(tensor + 8).value = 2  # behind the address: its kind of device, kDLCUDA
        return capsule

    # Elements and views.

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def _key(self, key: Any) -> tuple[Any, bool]:
        """An index for NumPy, which always gives an array; and does it take single elements?"""
        arrays: list[ndarray] = []
        parts = list(host(key if isinstance(key, tuple) else (key,), arrays))
        order([self, *arrays])
        if any(array.dtype == bool for array in arrays):
            return (*parts, ...), True
        axis, single, whole = 0, False, False
        for i, part in enumerate(parts):
            kind = type(part)
            if part is Ellipsis:
                axis, whole = self.ndim - sum(each is not None for each in parts[i + 1 :]), True
            elif part is not None:
                if kind is np.ndarray or (kind is list and part):  # beyond the end, CuPy begins anew
                    parts[i] = np.asarray(np.asarray(part).astype(np.int64) % max(self.shape[axis], 1))
                single = single or kind is np.ndarray or kind is list
                axis += 1
        if not whole:
            parts.append(...)
        return tuple(parts), single

    def __getitem__(self, key: Any) -> ndarray:
        where, single = self._key(key)
        if not single:
            return device_array(self._a[where], (self,))
        if any(type(part) is np.ndarray and part.dtype == bool for part in where):
            clock.read()  # how many there are
        return device_array(self._a[where].copy())

    def __setitem__(self, key: Any, value: Any) -> None:
        where, single = self._key(key)
        if single and any(type(part) is np.ndarray and part.dtype == bool for part in where):
            clock.read()  # how many there are
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if isinstance(value, ndarray):
            order([value])
            if single and value.size > 1:
                taken = np.arange(self.size).reshape(self.shape)[where]
                if np.unique(taken).size != taken.size:
                    raise Fault("an element was assigned to twice: which value stays is left to chance")
        self._a[where] = value._a if isinstance(value, ndarray) else value

    def __copy__(self) -> Any:
        return self.astype(self.dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.astype(self.dtype)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return call("astype", np.ndarray.astype, (self, dtype, order), {"copy": True}, "cupy.ndarray")

    def argsort(self, axis: int = -1, kind: Any = None) -> ndarray:
        if kind not in (None, "stable"):
            raise ValueError(f"kind={kind!r} is not supported")
        return call("argsort", np.ndarray.argsort, (self, axis, "stable"), {}, "cupy.ndarray")

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> ndarray:
        return call("clip", np.clip, (self, min, max), {} if out is None else {"out": out})

    for _name in METHODS:
        locals()[_name] = method(_name)
    for _name, _ufunc in {
        "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
        "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
        "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
    }.items():  # fmt: skip
        locals()[f"__{_name}__"] = operator(_ufunc)
        locals()[f"__r{_name}__"] = operator(_ufunc, swapped=True)
        locals()[f"__i{_name}__"] = operator(_ufunc, in_place=True)
    for _name, _ufunc in {
        "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
        "neg": "negative", "abs": "absolute", "invert": "invert",
    }.items():  # fmt: skip
        locals()[f"__{_name}__"] = operator(_ufunc)
    del _name, _ufunc


# Where arrays come from.


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    if isinstance(a, ndarray):
        return a.astype(a.dtype if dtype is None else dtype, copy=bool(copy))
    clock.order()
    if isinstance(a, list | tuple) and any(isinstance(each, ndarray) for each in a):
        a = [each._a if isinstance(each, ndarray) else each for each in a]
    return device_array(np.array(a, dtype))


def array(
    obj: Any, dtype: Any = None, copy: Any = True, order: str = "K", subok: bool = False, ndmin: int = 0,
    *, blocking: bool = False,
) -> ndarray:  # fmt: skip
    return asarray(obj, dtype, copy=copy)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Host = None, *, blocking: bool = True) -> Host:
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def argsort(a: ndarray, axis: int = -1, kind: Any = None) -> ndarray:
    return a.argsort(axis, kind)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return call("ascontiguousarray", np.ascontiguousarray, (a, dtype), {})


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    return bool(np.may_share_memory(a._a, b._a))


shares_memory = may_share_memory


def get_default_memory_pool() -> cuda.MemoryPool:
    return pool


def __getattr__(name: str) -> Any:
    """Everything else that CuPy has is NumPy's, run on the device."""
    if f"cupy.{name}" not in NAMES:
        raise AttributeError(f"CuPy has no cupy.{name}")
    thing = getattr(np, name)
    if isinstance(thing, type) or not callable(thing):
        return thing

    def run(*args: Any, **keywords: Any) -> Any:
        return call(name, thing, args, keywords)

    run.__name__ = name
    return run


with contextlib.suppress(ImportError, RuntimeError):  # no MPI here: minizero says so itself
    mpi.install()
