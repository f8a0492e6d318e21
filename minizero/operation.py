"""What do all operations share: operands, the dtype to compute in, broadcasting, and how one is remembered?

    @operation                                       enters the operation into `autograd.operations`, by name
    def mul(x, y):
        (x, y), dtype = operands("mul", x, y)        Tensors from whatever was given; the dtype to compute in
        product = compute("mul", xp.multiply, x, y, dtype)      forward; and backward, one share per input:
        return made("mul", product, (x, lambda g: g * value(y, dtype)), (y, lambda g: g * value(x, dtype)))

A share turns `g`, the gradient of the result, into the gradient of one input. `made` drops the shares of
inputs that want none, with all they would keep alive, and sums over axes along which an input was broadcast.
Shares keep Tensors, so that a parameter's array is looked up (and cast up from bfloat16, for as long as the
operation takes) when they run; they never write into `g`, which other inputs may be given too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .autograd import Axis, Operand, Share, Tensor, is_floating, operations, record, recording
from .backend import DTYPES, Array, add_rows, known, working, xp
from .parameter import View

Operation = TypeVar("Operation", bound=Callable[..., Tensor])


def operation(function: Operation) -> Operation:
    operations[function.__name__] = function
    return function


def tensor(x: Operand) -> Tensor:
    """`x` as a Tensor; of an array a copy, if it may have to be remembered."""
    return Tensor(x) if recording() and not isinstance(x, Tensor) else Tensor.of(x)


def operands(name: str, *given: Operand) -> tuple[list[Tensor], np.dtype[Any]]:
    """The operands as Tensors, and the dtype that `name` computes in. TypeError for float32 with float64."""
    try:
        tensors = [tensor(x) for x in given]
    except ValueError as error:
        raise TypeError(f"{name}: cannot compute with {', '.join(type(x).__name__ for x in given)}: {error}") from error
    found: list[list[Any]] = [[], [], []]  # dtypes of arrays with axes; of Tensors without; of plain numbers
    for x, t in zip(given, tensors, strict=True):
        if is_floating(t.dtype):
            found[0 if t.ndim and hasattr(x, "dtype") else 1 if x is t else 2].append(t.dtype)
        elif t.dtype.kind not in "iub":
            raise TypeError(f"{name}: cannot compute with {type(x).__name__} of dtype {t.dtype}")
    deciding = found[0] or found[1] or found[2][:1] or [DTYPES["float32"]]
    if len({working(each) for each in deciding}) > 1:
        mixed = " and ".join(dict.fromkeys(str(each) for each in deciding))
        raise TypeError(f"{name}: operands are {mixed}: convert one of them with .astype")
    return tensors, working(deciding[0])


def value(x: Tensor, dtype: np.dtype[Any]) -> Array:
    """The array of `x` now, in `dtype`: a copy only where a cast is needed."""
    return x.data.astype(dtype, copy=False)


def compute(name: str, function: Callable[..., Array], x: Tensor, y: Tensor, dtype: np.dtype[Any]) -> Array:
    """function(x, y), whose ValueError becomes a sentence that names the operation and both shapes."""
    try:
        return function(value(x, dtype), value(y, dtype))
    except ValueError as error:
        raise ValueError(f"{name}: shapes {x.shape} and {y.shape} do not fit together") from error


def unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """`gradient` summed over the axes along which an input of `shape` was repeated."""
    if gradient.shape == shape:
        return gradient
    new = gradient.ndim - len(shape)
    repeated = (new + i for i, length in enumerate(shape) if length == 1)
    return gradient.sum(axis=(*range(new), *repeated)).reshape(shape)


def made(name: str, result: Array | Tensor, *inputs: tuple[Tensor, Share]) -> Tensor:
    """`result`, remembering per input how its gradient follows from the gradient of the result."""
    ways = [(share, x.shape) if x.requires_grad else None for x, share in inputs]

    def backward(gradient: Array) -> tuple[Array | None, ...]:
        return tuple(way and unbroadcast(way[0](gradient), way[1]) for way in ways)

    return record(Tensor.of(result), tuple(x for x, _ in inputs), backward, name)


def seen(name: str, x: Tensor, look: Callable[[Array], Array], share: Share) -> Tensor:
    """`look(x)`, which copies nothing: of a parameter, a View that looks again at each use."""
    now = look(x.data)
    if x.node is None and x.parameter is None and not (x.requires_grad and recording()):
        now = now.copy()  # either may be used and frozen: it must not change through the other
    return made(name, Tensor.of(now) if x.parameter is None else View(x, look), (x, share))


def scatter_add(rows: int, ids: Array, source: Array) -> Array:
    """Zeros (rows, ...) with source[i] added to row ids[i]. `ids` (n,), `source` (n, ...).

    Sorted by id, the rows with one id are added in pairs, then pairs of pairs, and so on: log2(most repeats)
    rounds. No atomics, no order left to chance: the bits repeat, also on a GPU. Nor is it asked for numbers.

        turn    0   1   2   3   4      within the run of one id
        round   0 + 1   2 + 3   4      step 1
                0   +   2       4      step 2
                0       +       4      step 4: the first has the sum
    """
    count = ids.size
    if not count:
        return xp.zeros((rows, *source.shape[1:]), source.dtype)
    order = xp.argsort(ids, kind="stable")
    ids, source = ids[order], source[order]
    turn = xp.arange(count) - xp.searchsorted(ids, ids)
    most, step = known(turn.max(), count - 1), 1
    while step <= most:
        pairs = (turn[:-step] % (2 * step) == 0) & (ids[step:] == ids[:-step])
        add_rows(source[:-step], source[step:], pairs)
        step *= 2
    wanted = xp.arange(rows)
    first = xp.minimum(xp.searchsorted(ids, wanted), count - 1)
    total, absent = source[first], ids[first] != wanted
    xp.copyto(total, 0, where=absent.reshape(-1, *[1] * (total.ndim - 1)))
    return total


def rows_of(array: Array) -> Array:
    """(..., n) as (all leading axes in one, n)."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def spread(gradient: Array, shape: tuple[int, ...], axis: Axis, keepdims: bool) -> Array:
    """The gradient of a reduction over `axis`, repeated along it (without a copy)."""
    return xp.broadcast_to(gradient if keepdims or axis is None else xp.expand_dims(gradient, axis), shape)


def integers(name: str, what: str, given: Operand) -> Array:
    """`given` as an array of integers: of NumPy, or where it lives already."""
    given = given.data if isinstance(given, Tensor) else given
    ids = given if isinstance(given, xp.ndarray) else np.asarray(given)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: {what} must be integers, not {ids.dtype}")
    return ids


def within(name: str, what: str, given: Operand, count: int, dtype: Any) -> tuple[Array, Array | None]:
    """`given` as an array of `xp`, all in [0, count): maybe the caller's own.

    On a GPU they are not looked at here, as that would mean to wait for it. They come with an array of 1, or NaN where
    they lie elsewhere: what is taken there, and its gradient, must be multiplied by it, so that `step` refuses it.
    """
    ids = integers(name, what, given)
    if not isinstance(ids, np.ndarray):
        ids = ids.astype("int64", copy=False)
        return ids, xp.where((ids >= 0) & (ids < count), 1.0, math.nan).astype(dtype)
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if low < 0 or high >= count:
        raise IndexError(f"{name}: {what} must lie in 0 to {count - 1}, found {low if low < 0 else high}")
    return xp.asarray(ids), None
