"""Which array library is `xp`: CuPy if a GPU is usable, NumPy otherwise? Which device is mine?

The choice is made once, at import, and can be forced: `MINIZERO_BACKEND=auto|numpy|cupy`.

Importing this file also limits this process to one BLAS thread. N ranks on one machine would otherwise start
N times as many threads as it has cores, and a product computed by two threads has other bits than by one.
A GPU's products are computed in full float32 (TF32 would keep 10 bits of each factor), and with one workspace.
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any, TypeAlias

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[_variable] = "1"  # read by BLAS when NumPy is imported ...
os.environ.update(CUPY_TF32="0", NVIDIA_TF32_OVERRIDE="0", CUBLAS_WORKSPACE_CONFIG=":4096:8")  # read by CuPy and cuBLAS

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

threadpool_limits(limits=1)  # ... and for a NumPy that was imported before us


def _keep_freed_memory() -> None:
    """Let freed arrays be used again, as every GPU's memory pool does.

    glibc hands large freed arrays back to the system. Each new one then costs a page fault per 4 KiB, which was
    a fifth of a training step. The peak of a process stays what it is. (Elsewhere than on glibc: no effect.)
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping for a large array ...
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: ... and no return of free memory below 2 GiB


_keep_freed_memory()

Array: TypeAlias = Any  # an array of `xp`: numpy.ndarray or cupy.ndarray

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": np.dtype("float32"), "float64": np.dtype("float64"), "bfloat16": bfloat16}


def choose(wanted: str) -> tuple[str, ModuleType]:
    """The backend's name and array library for `wanted`, one of "auto", "numpy" and "cupy".

    Raises ValueError for another name, RuntimeError where CuPy is demanded and no GPU is usable.
    """
    if wanted not in ("auto", "numpy", "cupy"):
        raise ValueError(f"MINIZERO_BACKEND={wanted!r} is unknown: use auto, numpy or cupy")
    if wanted == "numpy":
        return "numpy", np
    try:
        import cupy
    except ImportError as error:
        if wanted == "cupy":
            raise RuntimeError(
                "MINIZERO_BACKEND=cupy, but CuPy cannot be imported "
                f"({error}): pip install 'cupy-cuda12x[ctk]' (or cuda13x), or use MINIZERO_BACKEND=auto"
            ) from error
        return "numpy", np
    if cupy.cuda.is_available():
        return "cupy", cupy
    if wanted == "cupy":
        raise RuntimeError(
            "MINIZERO_BACKEND=cupy, but CuPy finds no usable GPU: check `nvidia-smi`, or use MINIZERO_BACKEND=auto"
        )
    return "numpy", np


name, xp = choose(os.environ.get("MINIZERO_BACKEND", "auto"))
device = "cpu"  # this process's, in words
BLOCK = 16_384  # elements that are updated at once: on a CPU, five such blocks fit in the cache ...
ON_HOST = name == "numpy"  # are arrays in the host's memory, as random numbers are that were just drawn?
MOST_BLOCKS = 2**62 if name == "numpy" else 16  # ... and a GPU is slow to start: so many blocks at most


def use_device(local_rank: int) -> None:
    """Take GPU (`local_rank` mod the number of GPUs) for this process; `local_rank` counts the ranks of one node.

    comm.py calls it while minizero is imported: nobody can have allocated an array before. Several ranks may get the
    same GPU. Without a GPU there is nothing to take.
    """
    global device
    if name == "cupy":
        number = local_rank % xp.cuda.runtime.getDeviceCount()
        xp.cuda.Device(number).use()
        device = f"gpu {number}"


def device_facts() -> str:
    """Name and memory of this process's GPU; nothing where there is none."""
    if name == "numpy":
        return ""
    facts = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
    return f" ({facts['name'].decode()}, {facts['totalGlobalMem'] / 1e9:.1f} GB)"


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array with the values of `array` (a copy only where `array` lives on a GPU)."""
    return np.asarray(array) if name == "numpy" else xp.asnumpy(array)


def fill(array: Array, values: np.ndarray[Any, Any]) -> None:
    """array[:] = values, a contiguous NumPy array of the same shape and dtype. A GPU makes no copy of it on the way."""
    if name == "numpy":
        array[:] = values
    else:
        array.set(values)
        xp.cuda.get_current_stream().synchronize()  # till then, the GPU may read `values`


def known(number: Array, bound: int) -> int:
    """`number`, an array of one integer of at most `bound`, if it is known at once; else, on a GPU, just `bound`.

    A GPU works through its orders on its own. To ask it for a number would mean to wait until it has done them all.
    """
    return int(number) if name == "numpy" else bound


def add_rows(target: Array, source: Array, where: Array) -> None:
    """target[i] += source[i] for each i where `where[i]`: arrays (n, ...), (n, ...) and bools (n,).

    A GPU adds to all rows: how many there are to add, it would have to be asked. (x + -0.0 is x, even for -0.0.)
    """
    if name == "numpy":
        rows = np.flatnonzero(where)
        target[rows] += source[rows]
    else:
        target += xp.where(where.reshape(-1, *[1] * (source.ndim - 1)), source, source.dtype.type(-0.0))


def largest(array: Array, axis: Any, keepdims: bool) -> Array:
    """array.max(axis, keepdims), also where that is empty: CuPy finds no largest element in no rows."""
    nothing = array.sum(axis=axis, keepdims=keepdims) if array.size == 0 else None
    return nothing if nothing is not None and nothing.size == 0 else array.max(axis=axis, keepdims=keepdims)


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a name or dtype. Raises TypeError for a dtype that minizero does not train in."""
    key = dtype if isinstance(dtype, str | None) else np.dtype(dtype).name
    if key not in DTYPES:
        raise TypeError(f"dtype {key!r} is not supported: use one of {', '.join(DTYPES)}")
    return DTYPES[key]


def working(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that values of `dtype` are computed in: float32 for bfloat16, else `dtype` itself."""
    return DTYPES["float32"] if dtype == bfloat16 else dtype
