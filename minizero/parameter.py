"""How does a model's weight get its values, and when?

A `Parameter` is drawn late. It knows its shape, dtype and distribution, but has no values until someone needs
them: an engine, which draws one unit at a time, or the first forward of a model without engine. Its values
follow from (seed, its path in the model) alone, so the order of drawing does not matter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .autograd import Tensor
from .backend import Array, dtype_of, xp
from .frozen import freeze

Init = Callable[[np.random.Generator, int], np.ndarray[Any, Any]]  # (generator, count) -> count float32 values
DRAW_BLOCK = 16_384  # elements drawn at once: drawing needs no second copy of the parameter


def uniform(bound: float) -> Init:
    """Values between -bound and bound."""
    return lambda generator, count: generator.uniform(-bound, bound, count).astype(np.float32)


def normal(std: float) -> Init:
    """Normal values with mean 0 and standard deviation `std`."""
    return lambda generator, count: generator.standard_normal(count, np.float32) * np.float32(std)


def constant(value: float) -> Init:
    """`value` everywhere."""
    return lambda generator, count: np.full(count, value, np.float32)


class Parameter(Tensor):
    """A tensor that a model learns, drawn late.

    Args:
        shape: any number of axes, also none, also with zeros.
        init: how its elements are drawn, all alike: `uniform`, `normal`, `constant` or your own.
        dtype: "float32", "float64" or "bfloat16" (which computes in float32).
        requires_grad: False freezes it.
    """

    __slots__ = ("_dtype", "_shape", "init", "name", "unit")

    def __init__(self, shape: Sequence[int], init: Init, dtype: Any = "float32", requires_grad: bool = True) -> None:
        self._shape, self._dtype, self.init = tuple(shape), dtype_of(dtype), init
        self._data: Array = None
        self.requires_grad, self.grad, self.node, self.holders = requires_grad, None, None, 0
        self.name = ""  # its path in the model, known once that is drawn
        self.unit: Any = None  # the flat.Unit that it is a view of, in a model with an engine

    @property
    def data(self) -> Array:
        if self._data is None:
            raise RuntimeError(
                f"parameter {self.name} is not gathered here: under ZeRO-3 it is whole only while its own "
                "unit's module runs forward or backward; use it there, or call engine.gather_parameters()"
                if self.name
                else f"a parameter of shape {self.shape} has no values yet: call model.materialise() first"
            )
        return self._data

    @property
    def parameter(self) -> Parameter:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def __repr__(self) -> str:
        return super().__repr__() if self._data is not None else f"Parameter({self.name!r}, {self.shape}, not here now)"

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.unit.version if self.unit else 0

    def room(self) -> Array | None:
        return self.unit.room(self) if self.unit else None

    def bind(self, array: Array | None) -> None:
        """From now on, `data` is `array`, of the parameter's shape and dtype; None: there is no data."""
        self._data = array
        if self.holders:
            freeze(array)

    def fill(self, flat: Array, seed: int) -> None:
        """Write the parameter's values into `flat`, one axis of `size` elements: those it has, or fresh ones."""
        if self._data is not None:
            flat[:] = self._data.reshape(-1)
            return
        generator = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        for start in range(0, self.size, DRAW_BLOCK):
            block = flat[start : start + DRAW_BLOCK]
            block[:] = xp.asarray(self.init(generator, block.size))


class View(Tensor):
    """A view of a parameter, such as `w.T`: it looks its base up at each use, and so never keeps it alive."""

    __slots__ = ("_base", "_look")

    def __init__(self, base: Tensor, look: Callable[[Array], Array]) -> None:
        self._base, self._look = base, look
        self.requires_grad, self.grad, self.node, self.holders = False, None, None, 0

    @property
    def parameter(self) -> Tensor | None:
        return self._base.parameter

    @property
    def data(self) -> Array:
        return self._look(self._base.data)
