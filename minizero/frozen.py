"""How is it noticed that an array was changed that backward still needs?

    y = F.linear(x, w)        keeps x and w for backward
    w.data += 1               would make the gradient wrong, and nobody would know

A weight, or a tensor made by hand, is read-only from the operation that uses it until that operation's backward has
run, or its result is dropped; the result of a recorded operation stays read-only. NumPy then refuses to write. An
engine writes to its units' vectors, not through parameters: there, a count of changes is compared. What a caller gives
as an array is copied when it becomes a Tensor, so a loader may use its buffer again at once.

What it does not see: writes through a view that was taken earlier, and to an engine's vectors themselves.
CuPy cannot make an array read-only: on a GPU only changes by an engine, or by load_weights, are noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from .backend import Array

if TYPE_CHECKING:
    from .autograd import Tensor


class Hold:
    """What one operation must find unchanged in its backward. Nothing is kept alive; dropping the Hold ends it."""

    __slots__ = ("held", "versions")

    def __init__(self, tensors: Collection[Tensor]) -> None:
        self.versions = tuple((tensor, tensor.version) for tensor in tensors if tensor.parameter is not None)
        self.held = tuple(weakref.ref(tensor) for tensor in tensors if tensor.holders or writeable(tensor._data))
        for tensor in (reference() for reference in self.held):
            if tensor is not None:
                tensor.holders += 1
                freeze(tensor._data)

    def check(self, name: str) -> None:
        """Raise RuntimeError where a parameter was updated since."""
        for parameter, version in self.versions:
            if parameter.version != version:
                called = getattr(parameter, "name", "a parameter")
                raise RuntimeError(f"backward of {name}: {called} was changed by step() or load() after the forward "
                                   "that used it: run backward first, or forward again")  # fmt: skip

    def __del__(self) -> None:
        for tensor in (reference() for reference in self.held):
            if tensor is not None:
                tensor.holders -= 1
                if not tensor.holders and isinstance(tensor._data, np.ndarray):
                    tensor._data.flags.writeable = True


def writeable(array: Array) -> bool:
    """May somebody write to it? (Nobody to what is not here; anybody to a GPU's arrays.)"""
    return array is not None and (not isinstance(array, np.ndarray) or bool(array.flags.writeable))


def freeze(array: Array) -> None:
    """Let NumPy refuse to write to this array from now on."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
