"""What is the forward and backward of each operation?

Each is its forward and, per input, one small function for its backward; operation.py puts them together. Operands are
Tensors, arrays or numbers. Results are float64 if the operands are, else float32. Numbers, arrays without axes,
integers and bools take the others' dtype. At 0, IEEE arithmetic decides: log is -inf, log' and sqrt' inf; relu' is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .autograd import Axis, Operand, Share, Tensor
from .backend import Array, dtype_of, largest, working, xp
from .operation import compute, integers, made, operands, operation, rows_of, scatter_add, seen, spread, tensor, value
from .operation import within as within


@operation
def add(x: Operand, y: Operand) -> Tensor:
    (x, y), dtype = operands("add", x, y)
    return made("add", compute("add", xp.add, x, y, dtype), (x, lambda g: g), (y, lambda g: g))


@operation
def sub(x: Operand, y: Operand) -> Tensor:
    (x, y), dtype = operands("sub", x, y)
    return made("sub", compute("sub", xp.subtract, x, y, dtype), (x, lambda g: g), (y, lambda g: -g))


@operation
def mul(x: Operand, y: Operand) -> Tensor:
    (x, y), dtype = operands("mul", x, y)
    product = compute("mul", xp.multiply, x, y, dtype)
    return made("mul", product, (x, lambda g: g * value(y, dtype)), (y, lambda g: g * value(x, dtype)))


@operation
def div(x: Operand, y: Operand) -> Tensor:
    (x, y), dtype = operands("div", x, y)
    ratio = compute("div", xp.divide, x, y, dtype)
    return made("div", ratio, (x, lambda g: g / value(y, dtype)), (y, lambda g: -g * ratio / value(y, dtype)))


@operation
def neg(x: Operand) -> Tensor:
    return mul(x, -1)


@operation
def pow(x: Operand, exponent: float) -> Tensor:
    """x ** exponent, for a constant exponent."""
    if isinstance(exponent, Tensor):
        raise TypeError("pow: the exponent must be a number, not a Tensor")
    (x,), dtype = operands("pow", x)
    n = float(exponent)
    return made("pow", value(x, dtype) ** n, (x, lambda g: g * n * value(x, dtype) ** (n - 1 if n else 0.0)))


@operation
def matmul(x: Operand, y: Operand) -> Tensor:
    """(..., n, k) @ (..., k, m) = (..., n, m); leading axes broadcast. (k,) is a row if x, a column if y."""
    (x, y), dtype = operands("matmul", x, y)
    if not x.ndim or not y.ndim or x.shape[-1] != y.shape[-2:][0]:
        raise ValueError(f"matmul: shapes {x.shape} and {y.shape} do not fit together")
    if y.ndim == 1:
        return index(matmul(x, reshape(y, (*y.shape, 1))), (..., 0))
    if x.ndim == 1:
        return index(matmul(reshape(x, (1, *x.shape)), y), (..., 0, slice(None)))
    product = compute("matmul", xp.matmul, x, y, dtype)
    flat = rows_of if y.ndim == 2 else lambda a: a  # one product (k, all n) @ (all n, m), not a sum of many

    def share(g: Array) -> Array:
        return flat(value(x, dtype)).swapaxes(-1, -2) @ flat(g)

    return made("matmul", product, (x, lambda g: g @ value(y, dtype).swapaxes(-1, -2)), (y, share))


@operation
def linear(x: Operand, weight: Operand, bias: Operand = None) -> Tensor:
    """x @ weight.T + bias, as one node: x (..., in), weight (out, in), bias (out,); result (..., out)."""
    (x, weight, *rest), dtype = operands("linear", x, weight, *([] if bias is None else [bias]))
    fits = x.ndim and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    if not fits or any(b.shape != weight.shape[:1] for b in rest):
        raise ValueError(f"linear: shapes {[t.shape for t in (x, weight, *rest)]} do not fit together")
    shape, rows, outputs = x.shape, x.size // (x.shape[-1] or 1), weight.shape[0]
    if 8 * rows <= outputs:  # few rows are multiplied from the other side: BLAS rearranges them, not the weight
        result = xp.ascontiguousarray((value(weight, dtype) @ rows_of(value(x, dtype)).T).T)
    else:
        result = rows_of(value(x, dtype)) @ value(weight, dtype).T  # (all leading, in) @ (in, out)
    for b in rest:
        result += value(b, dtype)
    return made(
        "linear",
        result.reshape(*shape[:-1], outputs),
        (x, lambda g: (rows_of(g) @ value(weight, dtype)).reshape(shape)),
        (weight, lambda g: xp.matmul(rows_of(g).T, rows_of(value(x, dtype)), out=weight.room())),  # (out, in)
        *((b, lambda g: rows_of(g).sum(axis=0)) for b in rest),
    )


@operation
def sum(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    (x,), dtype = operands("sum", x)
    shape, total = x.shape, value(x, dtype).sum(axis=axis, keepdims=keepdims)
    return made("sum", total, (x, lambda g: spread(g, shape, axis, keepdims)))


@operation
def mean(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    (x,), dtype = operands("mean", x)
    shape, average = x.shape, value(x, dtype).mean(axis=axis, keepdims=keepdims)
    count = x.size // (average.size or 1) or 1
    return made("mean", average, (x, lambda g: spread(g / count, shape, axis, keepdims)))


@operation
def max(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The largest value; where several are equally large, they share its gradient evenly."""
    (x,), dtype = operands("max", x)
    array = value(x, dtype)
    top = largest(array, axis, keepdims)
    equal = array == spread(top, x.shape, axis, keepdims)
    ties = equal.sum(axis=axis, keepdims=keepdims, dtype=dtype)
    return made("max", top, (x, lambda g: equal * spread(g / ties, equal.shape, axis, keepdims)))


@operation
def reshape(x: Operand, shape: int | Sequence[int]) -> Tensor:
    """A view in another shape (a copy where strides forbid it), in the dtype of x."""
    x = tensor(x)
    before = x.shape
    return seen("reshape", x, lambda a: a.reshape(shape), lambda g: g.reshape(before))


@operation
def transpose(x: Operand, axes: Sequence[int] | None = None) -> Tensor:
    """x with its axes in the order of `axes`, reversed if there are none. A view, in the dtype of x."""
    x = tensor(x)
    order = tuple(axes or reversed(range(x.ndim)))

    def share(g: Array) -> Array:
        return g.transpose(sorted(range(g.ndim), key=[axis % g.ndim for axis in order].__getitem__))

    return seen("transpose", x, lambda a: a.transpose(order), share)


@operation
def index(x: Operand, key: Any) -> Tensor:
    """x[key]. Integers, slices, None and ... give a view; integer and bool arrays or Tensors copy."""
    x = tensor(x)
    shape, size = x.shape, x.size
    parts = [k.data if isinstance(k, Tensor) else k for k in (key if isinstance(key, tuple) else (key,))]
    at = tuple(Tensor(k).data if isinstance(k, (list, np.ndarray, xp.ndarray)) else k for k in parts)

    def share(g: Array) -> Array:
        full = xp.zeros(shape, g.dtype)
        full[at] = g
        return full

    def share_added(g: Array) -> Array:  # the same element may have been taken several times
        if len(at) == 1 and at[0].dtype.kind in "iu":  # whole rows, maybe counted from the end
            ids = at[0].reshape(-1).astype("int64")
            return scatter_add(shape[0], ids % shape[0], g.reshape(ids.size, *shape[1:]))
        taken = xp.arange(size).reshape(shape)[at]
        return scatter_add(size, taken.reshape(-1), g.reshape(-1)).reshape(shape)

    if not any(isinstance(part, xp.ndarray) for part in at):
        return seen("index", x, lambda a: a[at], share)
    return made("index", x.data[at].astype(working(x.dtype), copy=False), (x, share_added))


@operation
def concatenate(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Tensors one after the other along an axis."""
    inputs, dtype = operands("concatenate", *tensors)
    whole = xp.concatenate([value(x, dtype) for x in inputs], axis=axis)
    before = (slice(None),) * (axis % whole.ndim)
    ends = [0, *itertools.accumulate(x.shape[axis] for x in inputs)]

    def piece(first: int, last: int) -> Share:
        return lambda g: g[(*before, slice(first, last))]

    return made("concatenate", whole, *zip(inputs, map(piece, ends[:-1], ends[1:]), strict=True))


@operation
def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """x where the condition holds, else y; broadcast. What is not taken has gradient 0, even if it is nan."""
    (x, y), dtype = operands("where", x, y)
    on, zero = Tensor(condition).data.astype(bool, copy=False), xp.zeros((), dtype)
    result = compute(f"where, condition {on.shape}", lambda a, b: xp.where(on, a, b), x, y, dtype)
    return made("where", result, (x, lambda g: xp.where(on, g, zero)), (y, lambda g: xp.where(on, zero, g)))


@operation
def astype(x: Operand, dtype: Any) -> Tensor:
    """x in another of the dtypes float32, float64 and bfloat16."""
    x, before = tensor(x), working(tensor(x).dtype)
    return made("astype", x.data.astype(dtype_of(dtype)), (x, lambda g: g.astype(before)))


@operation
def exp(x: Operand) -> Tensor:
    (x,), dtype = operands("exp", x)
    y = xp.exp(value(x, dtype))
    return made("exp", y, (x, lambda g: g * y))


@operation
def log(x: Operand) -> Tensor:
    (x,), dtype = operands("log", x)
    return made("log", xp.log(value(x, dtype)), (x, lambda g: g / value(x, dtype)))


@operation
def sqrt(x: Operand) -> Tensor:
    (x,), dtype = operands("sqrt", x)
    y = xp.sqrt(value(x, dtype))
    return made("sqrt", y, (x, lambda g: g / (y + y)))


@operation
def tanh(x: Operand) -> Tensor:
    (x,), dtype = operands("tanh", x)
    y = xp.tanh(value(x, dtype))
    return made("tanh", y, (x, lambda g: g * (1 - y * y)))


@operation
def relu(x: Operand) -> Tensor:
    (x,), dtype = operands("relu", x)
    y = xp.maximum(value(x, dtype), 0)
    return made("relu", y, (x, lambda g: g * (y > 0)))


@operation
def gelu(x: Operand) -> Tensor:
    """x Φ(x) in its tanh form, x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016)."""
    (x,), dtype = operands("gelu", x)
    c, d = math.sqrt(2 / math.pi), 0.044715

    def half(a: Array) -> Array:
        return 0.5 + 0.5 * xp.tanh(c * a * (1 + d * a * a))

    def share(g: Array) -> Array:
        a = value(x, dtype)
        h = half(a)
        return g * h * (1 + 2 * a * (1 - h) * c * (1 + 3 * d * a * a))

    return made("gelu", value(x, dtype) * half(value(x, dtype)), (x, share))


@operation
def dropout(x: Operand, p: float, generator: np.random.Generator | None) -> Tensor:
    """Each element is 0 with probability p, drawn on the host, else x / (1 - p). Without generator just x."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must lie in [0, 1), not {p}")
    if generator is None or p == 0:
        return tensor(x)
    (x,), dtype, p = *operands("dropout", x), float(p)  # a NumPy float64 would make float64 of x
    factor = xp.asarray(generator.random(x.shape, dtype="float32") >= p).astype(dtype) / (1 - p)
    return made("dropout", value(x, dtype) * factor, (x, lambda g: g * factor))


@operation
def softmax(x: Operand, axis: int = -1) -> Tensor:
    (x,), dtype = operands("softmax", x)
    y = value(x, dtype)
    y = y - largest(y, axis, keepdims=True)
    y = xp.exp(y, out=y)
    y /= y.sum(axis=axis, keepdims=True)
    return made("softmax", y, (x, lambda g: y * (g - (g * y).sum(axis=axis, keepdims=True))))


@operation
def log_softmax(x: Operand, axis: int = -1) -> Tensor:
    (x,), dtype = operands("log_softmax", x)
    y = value(x, dtype)
    y = y - largest(y, axis, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=axis, keepdims=True))
    return made("log_softmax", y, (x, lambda g: g - xp.exp(y) * g.sum(axis=axis, keepdims=True)))


@operation
def layer_norm(x: Operand, gain: Operand, bias: Operand, eps: float = 1e-5) -> Tensor:
    """x (..., n) with mean 0 and variance 1 over its last axis, times gain (n,), plus bias (n,)."""
    (x, gain, bias), dtype = operands("layer_norm", x, gain, bias)
    if not x.ndim or not gain.shape == bias.shape == x.shape[-1:]:
        raise ValueError(f"layer_norm: x {x.shape}, gain {gain.shape}, bias {bias.shape} do not fit together")
    y = value(x, dtype)
    y = y - y.mean(axis=-1, keepdims=True)
    scale = 1 / xp.sqrt((y * y).mean(axis=-1, keepdims=True) + float(eps))  # (..., 1)
    y *= scale
    result = y * value(gain, dtype)
    result += value(bias, dtype)

    def share(g: Array) -> Array:
        g = g * value(gain, dtype)
        g -= g.mean(axis=-1, keepdims=True) + y * (g * y).mean(axis=-1, keepdims=True)
        return g * scale

    return made("layer_norm", result, (x, share), (gain, lambda g: g * y), (bias, lambda g: g))


@operation
def embedding(weight: Operand, tokens: Operand) -> Tensor:
    """Row `tokens` of the weight: weight (rows, width), integer tokens (...); result (..., width)."""
    weight = tensor(weight)
    if weight.ndim != 2:
        raise ValueError(f"embedding: the weight must be (rows, width), this one has shape {weight.shape}")
    ids, one = within("embedding", "tokens", tokens, weight.shape[0], working(weight.dtype))
    return index(weight, ids) if one is None else mul(index(weight, ids), one[..., None])


@operation
def cross_entropy(logits: Operand, targets: Operand) -> Tensor:
    """Mean of -log softmax(logits)[target]; 0 if empty. Logits (..., classes), integer targets (...)."""
    (logits,), dtype = operands("cross_entropy", logits)
    shape, targets = logits.shape, integers("cross_entropy", "targets", targets)
    if not shape or not shape[-1] or targets.shape != shape[:-1]:
        raise ValueError(f"cross_entropy: targets {targets.shape} do not fit logits {shape}, (..., classes)")
    column, one = within("cross_entropy", "targets", targets.reshape(-1).copy(), shape[-1], dtype)
    y, row, count = rows_of(value(logits, dtype)), xp.arange(column.size), column.size or 1
    y = y - largest(y, -1, keepdims=True)
    chosen = y[row, column] if one is None else y[row, column] * one
    y = xp.exp(y, out=y)
    total = y.sum(axis=-1, keepdims=True)
    loss = (xp.log(total[:, 0]) - chosen).sum() / count
    y /= total  # the probabilities

    def share(g: Array) -> Array:
        gradient = y * (g / count if one is None else g / count * one[:, None])
        gradient[row, column] -= g / count
        return gradient.reshape(shape)

    return made("cross_entropy", loss, (logits, share))


@operation
def mse_loss(prediction: Operand, target: Operand) -> Tensor:
    """Mean of the squared differences, of equal shapes; 0 if empty."""
    prediction, target = tensor(prediction), tensor(target)
    if prediction.shape != target.shape:
        raise ValueError(f"mse_loss: shapes {prediction.shape} and {target.shape} differ")
    return (mean if prediction.size else sum)(pow(sub(prediction, target), 2))
