"""Which array library is `xp`: CuPy if a GPU is usable, NumPy otherwise? Which device is mine?

The choice is made once, at import, and can be forced: `MINIZERO_BACKEND=auto|numpy|cupy`.

Importing this file also limits this process to one BLAS thread. N ranks on one machine would otherwise start
N times as many threads as it has cores, and a product computed by two threads has other bits than by one.
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any, TypeAlias

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[_variable] = "1"  # read by BLAS when NumPy is imported ...

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
                f"({error}): pip install cupy-cuda13x (or cupy-cuda12x), or use MINIZERO_BACKEND=auto"
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


def use_device(local_rank: int) -> str:
    """Take GPU (`local_rank` mod the number of GPUs) for this process, before its first allocation.

    `local_rank` counts the ranks of one node. Returns a description; without a GPU there is nothing to take.
    """
    if name == "numpy":
        return "cpu"
    device = local_rank % xp.cuda.runtime.getDeviceCount()
    xp.cuda.Device(device).use()
    return f"gpu {device}"


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array with the values of `array` (a copy only where `array` lives on a GPU)."""
    return np.asarray(array) if name == "numpy" else xp.asnumpy(array)


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a name or dtype. Raises TypeError for a dtype that minizero does not train in."""
    key = dtype if isinstance(dtype, str | None) else np.dtype(dtype).name
    if key not in DTYPES:
        raise TypeError(f"dtype {key!r} is not supported: use one of {', '.join(DTYPES)}")
    return DTYPES[key]


def working(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that values of `dtype` are computed in: float32 for bfloat16, else `dtype` itself."""
    return DTYPES["float32"] if dtype == bfloat16 else dtype
