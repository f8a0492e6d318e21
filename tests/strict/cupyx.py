"""The part of the stand-in that CuPy calls cupyx. See cupy/__init__.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cupy.cuda import DeviceSynchronized as DeviceSynchronized
from cupy.cuda import clock


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray[Any, Any]:
    return np.empty(shape, np.dtype(dtype))


@contextmanager
def allow_synchronize(allow: bool) -> Iterator[None]:
    before, clock.allowed = clock.allowed, allow
    try:
        yield
    finally:
        clock.allowed = before
