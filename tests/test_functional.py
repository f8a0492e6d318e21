"""Does each operation compute what NumPy says, and is its backward the derivative of its forward?

`CASES` holds, for each operation, some inputs and the same thing said in NumPy. The first tests below hold for
every case of every operation; the rest are about what is special to one of them.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minizero import functional as F
from minizero.autograd import Node, Tensor, no_grad, operations
from minizero.backend import bfloat16, to_host, working, xp
from minizero.operation import scatter_add
from minizero.parameter import View
from test_autograd import Parameter

Host: TypeAlias = "np.ndarray[Any, Any]"

rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """`call` on Tensors of `arrays` (float64) should be `reference` of the arrays."""

    name: str
    call: Callable[..., Tensor]
    reference: Callable[..., Any]
    arrays: tuple[Host, ...]

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join('x'.join(map(str, a.shape)) or '0d' for a in self.arrays)}"


CASES: list[Case] = []


def case(name: str, call: Callable[..., Tensor], reference: Callable[..., Any], *inputs: Any) -> None:
    """Add a case; an input may be given as a shape, to be drawn."""
    arrays = tuple(rng.standard_normal(i) if isinstance(i, tuple) else np.asarray(i) for i in inputs)
    CASES.append(Case(name, call, reference, arrays))


def positive(*shape: int) -> Host:
    return rng.uniform(0.5, 2.0, shape)


# arithmetic
BROADCASTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 4), (3, 4)), ((3, 4), (4,)), ((1,), (5, 4)), ((4, 1), (1, 4)), ((), (2,)), ((2, 3), ()), ((), ()),
    ((2, 1, 3), (4, 1)), ((0, 3), (1, 3)), ((0, 3), (3,)), ((1, 0), (2, 1)),
]  # fmt: skip
for one, two in BROADCASTS:
    case("add", F.add, np.add, one, two)
    case("sub", F.sub, np.subtract, one, two)
    case("mul", F.mul, np.multiply, one, two)
    case("div", F.div, np.divide, one, positive(*two))
SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (2, 1, 3), (), (1,), (0,), (2, 0)]
for shape in SHAPES:
    case("neg", F.neg, np.negative, shape)
    exponents: tuple[Any, ...] = (2, 3, 1, 0, np.float64(2))
    for power in exponents:
        case("pow", lambda x, n=power: F.pow(x, n), lambda x, n=power: x**n, shape)
    for power in (-1, 0.5, -1.5):
        case("pow", lambda x, n=power: x**n, lambda x, n=power: x**n, positive(*shape))

# products
for one, two in [
    ((3, 4), (4, 5)), ((1, 1), (1, 1)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)), ((2, 1, 3, 4), (1, 5, 4, 2)), ((6, 2, 3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 3)),
    ((3, 4), (4,)), ((2, 3, 4), (4,)), ((4,), (2, 4, 3)), ((0, 4), (4, 3)), ((3, 0), (0, 2)), ((2, 0, 4), (4, 3)),
    ((0, 3, 4), (4, 2)), ((0, 3, 4), (1, 4, 2)),
]:  # fmt: skip
    case("matmul", F.matmul, np.matmul, one, two)


def numpy_linear(x: Host, w: Host, b: Host | float = 0.0) -> Host:
    return np.asarray(x @ w.T + b)


for leading in [(5,), (2, 3), (2, 1, 3), (), (0,), (2, 0)]:
    case("linear", F.linear, numpy_linear, (*leading, 4), (3, 4), (3,))
    case("linear", F.linear, numpy_linear, (*leading, 4), (1, 4))
    case("linear", F.linear, numpy_linear, (*leading, 4), (60, 4), (60,))  # few rows: the product from the other side
case("linear", F.linear, numpy_linear, (2, 0), (3, 0), (3,))

# reductions
REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max}
for shape, axis in [
    ((3, 4), None), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), (0, 2)), ((2, 3, 4), (-1, 0)), ((2, 3, 4), 1),
    ((2, 3, 4), (0, 1, 2)), ((5,), 0), ((), None), ((), ()), ((2, 3), ()), ((1, 3), 0), ((0, 3), 1), ((2, 0, 3), 0),
]:  # fmt: skip
    for keep in (False, True):
        for name in REDUCTIONS:
            case(
                name,
                lambda x, f=operations[name], a=axis, k=keep: f(x, axis=a, keepdims=k),
                lambda x, f=REDUCTIONS[name], a=axis, k=keep: f(x, axis=a, keepdims=k),
                shape,
            )
for axis in (None, 0):
    case("sum", lambda x, a=axis: F.sum(x, a), lambda x, a=axis: x.sum(a), (0, 3))

# shapes
for shape, new in [
    ((2, 6), (3, 4)), ((2, 6), (-1,)), ((2, 6), 12), ((2, 6), -1), ((2, 6), [4, -1]), ((2, 6), (2, 1, 6)), ((1,), ()),
    ((), (1, 1)), ((), ()), ((0, 3), (3, 0)), ((2, 0), (0,)),
]:  # fmt: skip
    case("reshape", lambda x, n=new: F.reshape(x, n), lambda x, n=new: x.reshape(n), shape)
case("reshape", lambda x: x.reshape(3, np.int64(2)), lambda x: x.reshape(3, 2), (6,))
for shape, axes in [
    ((3, 4), None), ((2, 3, 4), None), ((2, 3, 4), (1, 0, 2)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4), [-1, 0, -2]),
    ((5,), None), ((5,), (0,)), ((), None), ((0, 3), None), ((2, 3, 4, 5), (0, 2, 1, 3)),
]:  # fmt: skip
    case("transpose", lambda x, a=axes: F.transpose(x, a), lambda x, a=axes: x.transpose(a), shape)
case("transpose", lambda x: x.swapaxes(-1, 0), lambda x: x.swapaxes(-1, 0), (2, 3, 4))
case("transpose", lambda x: x.transpose(2, 0, 1).T, lambda x: x.transpose(2, 0, 1).T, (2, 3, 4))

KEYS: list[tuple[tuple[int, ...], Any]] = [
    ((5, 3), 2), ((5, 3), -1), ((5, 3), slice(1, 4)), ((5, 3), slice(None, None, -2)), ((5, 3), (1, 2)), ((5,), 3),
    ((5, 3), (slice(None), 1)), ((5, 3), (Ellipsis, 0)), ((5, 3), None), ((5, 3), (slice(2), None, -1)), ((), ()),
    ((), None), ((5, 3), slice(2, 2)), ((0, 3), slice(None)), ((5, 3), np.int64(4)), ((5, 3), ()), ((), Ellipsis),
    ((5, 3), np.array([0, 2, 2, -1, 2])), ((5, 3), [1, 1, 1]), ((5, 3), np.array([[0, 1], [1, 4]])),
    ((5, 3), np.array(2)), ((5, 3), np.array([], dtype=np.int64)), ((5,), np.array([3, 3, -2, 0, 3, 3, 3])),
    ((5, 3), (np.array([0, 1, 1]), np.array([2, 0, 0]))), ((5, 3), (slice(None), np.array([0, 0, 2]))),
    ((5, 3), (np.arange(5)[:, None], np.array([1, 1]))), ((5, 3), (np.array([4, 4]), slice(1, 3))),
    ((2, 3, 4), (1, np.array([0, 2, 0]))), ((2, 3, 4), (Ellipsis, np.array([0, -1, -1]))), ((2, 3, 4), (None, [1, 1])),
    ((3,), np.array([True, False, True])), ((2, 3), np.array([[True, False, True], [False, False, True]])),
    ((300, 2), np.array([0, 255, 255, 7], dtype=np.uint8)), ((5, 3), np.array([-1, -1, 4], dtype=np.int8)),
]  # fmt: skip
for shape, key in KEYS:
    case("index", lambda x, k=key: x[k], lambda x, k=key: x[k], shape)
case("index", lambda x: x[Tensor(np.array([1, 1, 0]))], lambda x: x[[1, 1, 0]], (2, 3))
case("index", lambda x: x[:, Tensor(np.array([1, 1, 0]))], lambda x: x[:, [1, 1, 0]], (2, 3))

JOINS: list[tuple[list[tuple[int, ...]], int]] = [
    ([(2, 3), (4, 3)], 0), ([(2, 3), (2, 1)], 1), ([(2, 3), (2, 1), (2, 2)], -1), ([(2, 3, 2), (2, 1, 2)], -2),
    ([(3,)], 0), ([(2, 0), (2, 3)], 1), ([(0, 3), (0, 3)], 0),
]  # fmt: skip
for pieces, dim in JOINS:
    case(
        "concatenate",
        lambda *xs, a=dim: F.concatenate(xs, axis=a),
        lambda *xs, a=dim: np.concatenate(xs, axis=a),
        *pieces,
    )
for condition, one, two in [
    ([[True, False, True], [False, False, True]], (2, 3), (2, 3)), ([True, False, True], (2, 3), (2, 1)),
    ([[True], [False]], (3,), ()), (True, (2,), (2,)), (np.zeros((0, 3), bool), (3,), (1, 3)), ([1, 0], (2,), (2,)),
]:  # fmt: skip
    holds = np.asarray(condition)
    case("where", lambda x, y, c=holds: F.where(c, x, y), lambda x, y, c=holds: np.where(c, x, y), one, two)
case("where", lambda x, y: F.where(Tensor(np.array([True, False])), x, y), lambda x, y: np.stack([x, y]), (), ())
case("astype", lambda x: F.astype(x, "float64"), lambda x: x.astype("float64"), (2, 3))
case("astype", lambda x: F.astype(x, np.float64), lambda x: x.astype("float64"), ())


# elementwise functions
def numpy_gelu(x: Host) -> Host:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def numpy_dropout(x: Host) -> Host:
    return np.where(np.random.default_rng(7).random(x.shape, dtype=np.float32) < 0.4, 0.0, x / 0.6)


for shape in SHAPES:
    case("exp", F.exp, np.exp, shape)
    case("log", F.log, np.log, positive(*shape))
    case("sqrt", F.sqrt, np.sqrt, positive(*shape))
    case("tanh", F.tanh, np.tanh, shape)
    case("relu", F.relu, lambda x: np.maximum(x, 0), shape)
    case("gelu", F.gelu, numpy_gelu, shape)
    case("dropout", lambda x: F.dropout(x, 0.4, np.random.default_rng(7)), numpy_dropout, shape)
case("dropout", lambda x: F.dropout(x, 0.4, None), lambda x: x, (3, 4))
case("dropout", lambda x: F.dropout(x, 0, np.random.default_rng(7)), lambda x: x, (3, 4))


# normalisation and losses
def numpy_softmax(x: Host, axis: int) -> Host:
    return np.asarray(np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True))


for shape, dim in [((3, 4), -1), ((3, 4), 0), ((2, 3, 4), 1), ((5,), 0), ((2, 1), -1), ((0, 3), -1), ((2, 0), 0)]:
    case("softmax", lambda x, a=dim: F.softmax(x, axis=a), lambda x, a=dim: numpy_softmax(x, a), shape)
    case("log_softmax", lambda x, a=dim: F.log_softmax(x, a), lambda x, a=dim: np.log(numpy_softmax(x, a)), shape)


def numpy_layer_norm(x: Host, gain: Host, bias: Host) -> Host:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias)


for leading in [(3,), (2, 3), (), (0,), (2, 0), (1, 1)]:
    case("layer_norm", F.layer_norm, numpy_layer_norm, (*leading, 4), (4,), (4,))
case("layer_norm", F.layer_norm, numpy_layer_norm, (3, 1), (1,), (1,))

for tokens in ([0, 3, 3, 1, 3], [[0, 1], [1, 4]], [], 2, [4] * 9):
    ids = np.asarray(tokens, dtype=np.int64)
    case("embedding", lambda w, t=ids: F.embedding(w, t), lambda w, t=ids: w[t], (5, 3))
case("embedding", lambda w: F.embedding(w, Tensor(np.array([1, 1], "u1"))), lambda w: w[[1, 1]], (300, 2))


def numpy_cross_entropy(logits: Host, targets: Host) -> float:
    p = np.take_along_axis(numpy_softmax(logits, -1), targets[..., None], -1)
    return float(-np.log(p).sum() / max(p.size, 1))


for shape in [(5, 3), (2, 4, 3), (1, 3), (3,), (2, 1), (0, 3), (2, 0, 3)]:
    labels = rng.integers(0, shape[-1], shape[:-1])
    case(
        "cross_entropy",
        lambda x, t=labels: F.cross_entropy(x, t),
        lambda x, t=labels: numpy_cross_entropy(x, np.asarray(t)),
        shape,
    )
for shape in [(3, 4), (5,), ()]:
    case("mse_loss", F.mse_loss, lambda x, y: ((x - y) ** 2).mean(), shape, shape)


def every_case(test: Callable[[Case], None]) -> Callable[[str], None]:
    """Run `test` for all cases of each operation, one test per operation."""

    def run(name: str) -> None:
        for case in CASES:
            if case.name == name:
                try:
                    test(case)
                except Exception as error:
                    raise AssertionError(f"in case {case}") from error

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    marked: Callable[[str], None] = pytest.mark.parametrize("name", sorted(operations))(run)
    return marked


# What follows holds for every operation


def tensors(case: Case, dtype: Any = np.float64, requires_grad: bool = True) -> list[Tensor]:
    return [Tensor(a.astype(dtype), requires_grad) for a in case.arrays]


def close(actual: Any, expected: Any, tolerance: float = 1e-7) -> None:
    actual, expected = to_host(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def weights_like(result: Tensor) -> Host:
    """A gradient to start from: all different, so that a gradient that arrives at the wrong place shows."""
    return np.random.default_rng(1).uniform(0.5, 1.5, result.shape)


def slope(function: Callable[..., Any], arrays: tuple[Host, ...], which: int, weights: Host) -> Host:
    """d sum(weights * function(arrays)) / d arrays[which], by central differences."""
    moved = [a.copy() for a in arrays]
    result, step = np.zeros(arrays[which].shape), 1e-5
    for at in np.ndindex(arrays[which].shape):
        sums = []
        for side in (step, -step):
            moved[which][at] = arrays[which][at] + side
            sums.append(float(np.sum(weights * function(*moved))))
        moved[which][at] = arrays[which][at]
        result[at] = (sums[0] - sums[1]) / (2 * step)
    return result


def test_every_registered_operation_has_a_gradient_check() -> None:
    assert {case.name for case in CASES} == set(operations)
    for name, function in operations.items():
        assert getattr(F, name) is function


@every_case
def test_forward_agrees_with_numpy(case: Case) -> None:
    close(case.call(*tensors(case)).data, case.reference(*case.arrays), 1e-12)


@every_case
def test_backward_is_the_derivative_of_forward(case: Case) -> None:
    inputs = tensors(case)
    result = case.call(*inputs)
    result.backward(weights_like(result))
    for i, x in enumerate(inputs):
        close(x.grad, slope(case.reference, case.arrays, i, weights_like(result)))


@every_case
def test_a_gradient_does_not_depend_on_which_others_are_wanted(case: Case) -> None:
    together = tensors(case)
    result = case.call(*together)
    result.backward(weights_like(result))
    for i in range(len(together)):
        alone = tensors(case, requires_grad=False)
        alone[i] = Tensor(case.arrays[i], requires_grad=True)
        case.call(*alone).backward(weights_like(result))
        assert to_host(alone[i].grad).tobytes() == to_host(together[i].grad).tobytes()
        assert all(x.grad is None for x in alone if x is not alone[i])


@every_case
def test_arrays_and_tensors_give_the_same_and_nothing_is_recorded_without_need(case: Case) -> None:
    if case.name in ("index", "transpose", "reshape", "pow"):
        inputs: list[Any] = tensors(case, requires_grad=False)  # called as methods
    else:
        inputs = [xp.asarray(a) for a in case.arrays]
    plain = case.call(*inputs)
    with no_grad():
        quiet = case.call(*tensors(case))
    recorded = case.call(*tensors(case))
    assert plain.node is None
    assert not plain.requires_grad
    assert recorded.node is not None or case.name == "dropout"
    assert quiet.node is None
    assert plain.numpy().tobytes() == quiet.numpy().tobytes() == recorded.numpy().tobytes()


@every_case
def test_float32_stays_float32(case: Case) -> None:
    inputs = tensors(case, np.float32)
    result = case.call(*inputs)
    if case.name != "astype":
        assert result.dtype == np.float32
        close(result.data, case.reference(*case.arrays), 1e-4)
    result.backward(weights_like(result))
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [np.float32] * len(inputs)


@every_case
def test_bfloat16_is_cast_up_where_it_is_used(case: Case) -> None:
    rounded = [Tensor(xp.asarray(a.astype(bfloat16)), requires_grad=True) for a in case.arrays]
    wide = [Tensor(x.data.astype(np.float32), requires_grad=True) for x in rounded]
    result, expected = case.call(*rounded), case.call(*wide)
    if result.dtype == bfloat16:  # only views, which are cast when something is computed with them
        assert case.name in ("reshape", "transpose", "index", "dropout")
    cast = to_host(result.data.astype(expected.dtype))
    assert cast.tobytes() == expected.numpy().tobytes()
    for x in (result, expected):
        x.backward(weights_like(expected))
    for a, b in zip(rounded, wide, strict=True):
        assert a.grad is not None
        assert a.grad.dtype == np.float32
        assert to_host(a.grad).tobytes() == to_host(b.grad).tobytes()


@every_case
def test_forward_and_backward_write_into_nothing_they_were_given(case: Case) -> None:
    inputs = tensors(case)
    result = case.call(*inputs)
    values = result.numpy().copy()
    gradient = xp.asarray(weights_like(result))
    result.backward(gradient)
    assert to_host(gradient).tobytes() == weights_like(result).tobytes()
    assert result.numpy().tobytes() == values.tobytes()
    for x, array in zip(inputs, case.arrays, strict=True):
        assert x.numpy().tobytes() == array.tobytes()


@every_case
def test_forward_and_backward_repeat_bit_for_bit(case: Case) -> None:
    def run() -> list[bytes]:
        inputs = tensors(case, np.float32)
        result = case.call(*inputs)
        result.backward(weights_like(result))
        return [result.numpy().tobytes(), *(to_host(x.grad).tobytes() for x in inputs)]

    assert run() == run()


@every_case
def test_a_parameters_array_may_be_released_and_gathered_anew_before_backward(case: Case) -> None:
    inputs = tensors(case)
    expected = case.call(*inputs)
    expected.backward(weights_like(expected))

    parameters = [Parameter(a) for a in case.arrays]
    arrays = [weakref.ref(p.data) for p in parameters]
    result = case.call(*parameters)
    for p in parameters:
        p.release()
    if case.name != "dropout":  # which may return the parameter itself
        assert [array() for array in arrays] == [None] * len(arrays)
    for p, a in zip(parameters, case.arrays, strict=True):
        p.gather(a)
    result.backward(weights_like(expected))
    for p, x in zip(parameters, inputs, strict=True):
        assert to_host(p.grad).tobytes() == to_host(x.grad).tobytes()


@every_case
def test_a_result_dies_with_its_last_name(case: Case) -> None:
    for run_backward in (False, True):
        inputs = tensors(case)
        result = case.call(*inputs)
        if run_backward:
            result.backward(weights_like(result))
        died = weakref.ref(result)
        same = any(result is x for x in inputs)  # dropout without generator
        del result
        assert same or died() is None  # at once, by reference count, not by the garbage collector


# What a closure keeps


def kept(thing: Any) -> Iterator[Any]:
    """The arrays that `thing` (a result, its node, a closure, ...) keeps alive for backward."""
    if isinstance(thing, xp.ndarray):
        yield thing
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            yield from kept(cell.cell_contents)
    elif isinstance(thing, (tuple, list)):
        for item in thing:
            yield from kept(item)
    elif isinstance(thing, Tensor) and not isinstance(thing, (Parameter, View)):
        yield thing.data


def kept_by(result: Tensor) -> list[Any]:
    assert isinstance(result.node, Node)
    return list({id(array): array for array in kept(result.node.backward)}.values())


def abs_of(x: Tensor) -> Tensor:
    return Tensor(abs(x.data), requires_grad=True)


def test_operations_keep_only_what_their_backward_needs() -> None:
    x, y = (Tensor(rng.standard_normal((3, 4)), requires_grad=True) for _ in range(2))
    frozen = Tensor(rng.standard_normal((4, 4)))
    for result in (x + y, x - y, x * 2.0 + y, x.sum(0), x.mean(), x.reshape(12), x.T, x[1:], F.concatenate([x, y])):
        assert kept_by(result) == []
    assert [a is z.data for z in [abs_of(x)] for a in kept_by(z.log())] == [True]
    for result in (x.exp(), F.relu(x), F.softmax(x), x.tanh(), abs_of(x).sqrt()):
        assert [a is result.data for a in kept_by(result)] == [True]
    for result in (x @ frozen, F.linear(x, frozen)):  # x itself is not needed for its own gradient
        assert [a is frozen.data for a in kept_by(result)] == [True]
    assert kept_by(F.embedding(x, np.array([2, 1])))[0].shape == (2,)  # the tokens
    assert len(kept_by(F.cross_entropy(x, np.array([2, 1, 0])))) == 3  # probabilities, row and column numbers


def test_no_float32_copy_of_a_bfloat16_weight_outlives_the_operation() -> None:
    x = Tensor(rng.standard_normal((2, 64)).astype(np.float32), requires_grad=True)
    w = Parameter(rng.standard_normal((32, 64)).astype(bfloat16))
    for result in (F.linear(x, w), x @ w.T, F.embedding(w, np.array([1, 2])), w.sum(), w[3:5] * x, w.mean(0), w.exp()):
        copies = [a for a in kept_by(result) if a.size == w.size and a is not result.data]
        assert copies == []


# Broadcasting, by hypothesis


@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, min_side=0, max_side=3),
    name=st.sampled_from(["add", "sub", "mul", "div", "where"]),
)
@settings(max_examples=80)
def test_gradients_have_the_inputs_shapes_whatever_was_broadcast(shapes: Any, name: str) -> None:
    one, two = (np.random.default_rng(i).uniform(0.5, 1.5, s) for i, s in enumerate(shapes.input_shapes))
    condition = np.random.default_rng(3).random(shapes.result_shape) < 0.5
    call: Callable[..., Tensor] = operations[name]
    reference: Callable[..., Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}.get(name, np.divide)
    if name == "where":
        call, reference = lambda a, b: F.where(condition, a, b), lambda a, b: np.where(condition, a, b)
    x, y = Tensor(one, requires_grad=True), Tensor(two, requires_grad=True)
    result = call(x, y)
    assert result.shape == shapes.result_shape
    result.backward(weights_like(result))
    close(x.grad, slope(reference, (one, two), 0, weights_like(result)))
    close(y.grad, slope(reference, (one, two), 1, weights_like(result)))


# dtypes

SCALARS = [2, 2.5, True, np.float64(2.5), np.float32(2.5), np.int64(3), np.array(2.5), np.array(3)]


@pytest.mark.parametrize("dtype", ["float32", "float64", bfloat16], ids=str)
@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}-{np.asarray(s).dtype}")
def test_numbers_take_the_tensors_dtype_in_both_orders(scalar: Any, dtype: Any) -> None:
    a = np.array([[1.0, -2.0, 4.0]])
    x = Tensor(a.astype(dtype), requires_grad=True)
    s = float(scalar)
    for result, expected in [
        (x * scalar, a * s), (scalar * x, s * a), (x + scalar, a + s), (scalar + x, s + a), (x - scalar, a - s),
        (scalar - x, s - a), (x / scalar, a / s), (scalar / x, s / a), (F.where(a > 0, x, s), np.where(a > 0, a, s)),
    ]:  # fmt: skip
        assert isinstance(result, Tensor)
        assert result.dtype == working(np.dtype(dtype))
        close(result.data, expected)
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == working(np.dtype(dtype))


def test_a_tensor_without_axes_takes_the_dtype_of_one_with_axes_and_decides_over_numbers() -> None:
    vector, loss = Tensor(np.ones(3, np.float32)), Tensor(np.float64(2))
    assert (vector * loss).dtype == (loss * vector).dtype == np.float32
    assert (loss * np.float32(2)).dtype == np.float64
    assert (Tensor(np.float32(2)) * np.float64(2)).dtype == np.float32


def test_integers_and_bools_are_cast_to_the_dtype_of_the_others() -> None:
    whole, truth = np.array([1, 2, 3]), np.array([True, False, True])
    for dtype in (np.float32, np.float64):
        x = Tensor(np.array([0.5, 1.5, 2.5], dtype), requires_grad=True)
        for other in (whole, truth, Tensor(whole), Tensor(truth), xp.asarray(whole)):
            for result in (x * other, x + other, F.where(truth, other, x)):
                assert result.dtype == dtype
        (x * Tensor(whole)).sum().backward()
        close(x.grad, whole)
    assert F.exp(whole).dtype == np.float32


def test_operations_that_only_move_values_keep_integers_as_they_are() -> None:
    tokens = Tensor(np.arange(6).reshape(2, 3))
    for moved in (tokens.T, tokens[:, :-1], tokens.reshape(6), tokens[np.array([1, 1])]):
        assert moved.dtype == tokens.dtype


MIXED: list[tuple[str, Callable[[Any, Any], Tensor]]] = [
    ("add", F.add), ("sub", F.sub), ("mul", F.mul), ("div", F.div), ("matmul", F.matmul), ("linear", F.linear),
    ("concatenate", lambda x, y: F.concatenate([x, y])), ("where", lambda x, y: F.where(True, x, y)),
    ("layer_norm", lambda x, y: F.layer_norm(x, y[0], y[0])), ("sub", F.mse_loss),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call"), MIXED, ids=[name for name, _ in MIXED])
def test_float32_and_float64_are_not_mixed(name: str, call: Callable[[Any, Any], Tensor]) -> None:
    narrow, wide = np.ones((2, 2), np.float32), np.ones((2, 2), np.float64)
    for x, y in [(Tensor(narrow), Tensor(wide)), (Tensor(narrow), wide), (Tensor(wide), narrow)]:
        with pytest.raises(TypeError, match=rf"^{name}: operands are float\d\d and float\d\d: .*\.astype$"):
            call(x, y)
    with pytest.raises(TypeError, match="bfloat16 and float64"):
        call(Tensor(xp.asarray(narrow.astype(bfloat16))), Tensor(wide))


def test_astype_casts_the_gradient_back() -> None:
    for before, after in [("float32", "float64"), ("float64", "float32"), ("float32", bfloat16), (bfloat16, "float32")]:
        x = Tensor(np.array([1.0, 2.0]).astype(before), requires_grad=True)
        y = F.astype(x, after)
        assert y.dtype == np.dtype(after)
        (y * y).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == working(np.dtype(before))
        close(x.grad, [2.0, 4.0])
    with pytest.raises(TypeError, match="int32"):
        F.astype(Tensor(np.ones(2)), "int32")


# Errors

x23 = Tensor(np.ones((2, 3)))
ERRORS: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (lambda: x23 @ x23, ValueError, ["matmul", "(2, 3) and (2, 3)"]),
    (lambda: x23 @ 2.0, ValueError, ["matmul", "(2, 3) and ()"]),
    (lambda: x23 @ np.ones(2), ValueError, ["matmul", "(2, 3) and (2,)"]),
    (lambda: np.ones(3) @ x23, ValueError, ["matmul", "(3,) and (2, 3)"]),
    (lambda: F.matmul(np.ones((2, 1, 3)), np.ones((3, 3, 1))), ValueError, ["matmul", "(2, 1, 3) and (3, 3, 1)"]),
    (lambda: x23 + np.ones(2), ValueError, ["add", "(2, 3) and (2,)"]),
    (lambda: x23 * np.ones(4), ValueError, ["mul", "(2, 3) and (4,)"]),
    (lambda: F.where([True, False], x23, 0.0), ValueError, ["where", "(2,)", "(2, 3)"]),
    (lambda: F.linear(x23, np.ones((5, 2))), ValueError, ["linear", "(2, 3)", "(5, 2)"]),
    (lambda: F.linear(x23, np.ones(3)), ValueError, ["linear", "(2, 3)", "(3,)"]),
    (lambda: F.linear(1.0, np.ones((1, 1))), ValueError, ["linear", "()", "(1, 1)"]),
    (lambda: F.linear(x23, np.ones((5, 3)), np.ones(4)), ValueError, ["linear", "(5, 3)", "(4,)"]),
    (lambda: F.linear(x23, np.ones((5, 3)), np.ones((1, 5))), ValueError, ["linear", "(1, 5)"]),
    (lambda: F.layer_norm(x23, np.ones(2), np.ones(3)), ValueError, ["layer_norm", "(2, 3)", "(2,)", "(3,)"]),
    (lambda: F.layer_norm(1.0, np.ones(1), np.ones(1)), ValueError, ["layer_norm", "()"]),
    (lambda: x23.reshape(4), ValueError, []),
    (lambda: x23.transpose(0), ValueError, []),
    (lambda: x23[2], IndexError, []),
    (lambda: x23[0, 0, 0], IndexError, []),
    (lambda: x23[0.5], IndexError, []),
    (lambda: F.pow(x23, x23.sum()), TypeError, ["pow", "number"]),
    (lambda: F.exp(np.ones(2, complex)), TypeError, ["exp", "complex128"]),
    (lambda: x23 + None, TypeError, ["add", "NoneType"]),
    (lambda: F.dropout(x23, 1.0, None), ValueError, ["dropout", "[0, 1)", "1.0"]),
    (lambda: F.dropout(x23, -0.1, None), ValueError, ["dropout", "-0.1"]),
    (lambda: F.embedding(x23, [0, 2]), IndexError, ["embedding", "tokens", "0 to 1", "found 2"]),
    (lambda: F.embedding(x23, [0, -1, 1]), IndexError, ["embedding", "0 to 1", "found -1"]),
    (lambda: F.embedding(x23, [0.0, 1.0]), TypeError, ["embedding", "tokens", "integers", "float64"]),
    (lambda: F.embedding(x23, [True]), TypeError, ["embedding", "bool"]),
    (lambda: F.embedding(np.ones(3), [0]), ValueError, ["embedding", "(3,)"]),
    (lambda: F.embedding(np.ones((0, 3)), [0]), IndexError, ["found 0"]),
    (lambda: F.cross_entropy(x23, [0, 3]), IndexError, ["cross_entropy", "targets", "0 to 2", "found 3"]),
    (lambda: F.cross_entropy(x23, [-1, 0]), IndexError, ["cross_entropy", "0 to 2", "found -1"]),
    (lambda: F.cross_entropy(x23, [0.0, 1.0]), TypeError, ["cross_entropy", "integers", "float64"]),
    (lambda: F.cross_entropy(x23, [0, 1, 2]), ValueError, ["cross_entropy", "(3,)", "(2, 3)"]),
    (lambda: F.cross_entropy(x23, [[0], [1]]), ValueError, ["cross_entropy", "(2, 1)", "(2, 3)"]),
    (lambda: F.cross_entropy(x23, 0), ValueError, ["cross_entropy", "()", "(2, 3)"]),
    (lambda: F.cross_entropy(1.0, 0), ValueError, ["cross_entropy", "()"]),
    (lambda: F.cross_entropy(np.ones((2, 0)), [0, 0]), ValueError, ["cross_entropy", "(2, 0)"]),
    (lambda: F.mse_loss(np.ones((3, 1)), np.ones(3)), ValueError, ["mse_loss", "(3, 1)", "(3,)"]),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error_names_the_operation_and_what_does_not_fit(number: int) -> None:
    call, kind, words = ERRORS[number]
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# What is special to one operation


def test_the_tied_largest_values_share_the_gradient_of_max_evenly() -> None:
    x = Tensor(np.array([[3.0, 1.0, 3.0], [2.0, 2.0, 2.0]]), requires_grad=True)
    x.max(axis=1).backward([6.0, 3.0])
    close(x.grad, [[3.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
    y = Tensor(np.ones((2, 2)), requires_grad=True)
    y.max().backward()
    close(y.grad, np.full((2, 2), 0.25))


def test_values_and_gradients_at_zero_are_the_documented_ones() -> None:
    def at_zero(call: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        x = Tensor(np.zeros(1), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy says "divide by zero"
            result = call(x)
            result.backward()
        return result.item(), float(to_host(x.grad)[0])

    assert at_zero(F.sqrt) == (0.0, math.inf)
    assert at_zero(F.log) == (-math.inf, math.inf)
    assert at_zero(F.relu) == (0.0, 0.0)
    assert at_zero(lambda x: x**2) == (0.0, 0.0)
    assert at_zero(lambda x: x**1) == (0.0, 1.0)
    assert at_zero(lambda x: x**0) == (1.0, 0.0)
    assert at_zero(lambda x: 1 / x) == (math.inf, -math.inf)
    # where() takes 0 for the side that was not chosen; what that side makes of it is IEEE arithmetic again
    assert at_zero(lambda x: F.where(x.data > 0, x, 1.0)) == (1.0, 0.0)
    value, gradient = at_zero(lambda x: F.where(x.data > 0, F.sqrt(x), 0.0))
    assert value == 0.0
    assert math.isnan(gradient)
    assert at_zero(lambda x: F.sqrt(F.where(x.data > 0, x, 1.0))) == (1.0, 0.0)  # so choose first


def test_where_passes_no_gradient_to_what_was_not_chosen_even_if_the_gradient_is_infinite() -> None:
    x, y = (Tensor(np.array([1.0, np.nan]), requires_grad=True) for _ in range(2))
    F.where([True, False], x, y).backward([np.inf, np.inf])
    close(x.grad, [np.inf, 0.0])
    close(y.grad, [0.0, np.inf])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_huge_logits_give_the_right_loss_and_gradient(size: float, dtype: Any) -> None:
    for sign in (1, -1):
        x = Tensor(np.array([[sign * size, 0.0, 0.0], [0.0, sign * size, 0.0]], dtype), requires_grad=True)
        loss = F.cross_entropy(x, [0, 0])
        loss.backward()
        if sign > 0:  # the first example is right for certain, the second wrong for certain
            assert loss.item() == size / 2
            expected = [[0, 0, 0], [-0.5, 0.5, 0]]
        else:
            assert loss.item() == pytest.approx((size + 2 * math.log(2)) / 2, rel=1e-7)
            expected = [[-0.5, 0.25, 0.25], [-0.25, 0, 0.25]]
        close(x.grad, expected)
        for result in (F.softmax(x), F.log_softmax(x)):
            assert np.isfinite(result.numpy()).all()


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_the_number_of_classes() -> None:
    for dtype in (np.uint8, np.int32, np.int64):
        assert F.cross_entropy(np.zeros((4, 7)), np.array([0, 6, 3, 3], dtype)).item() == pytest.approx(math.log(7))


def test_cross_entropy_over_leading_axes_is_the_mean_over_all_examples() -> None:
    logits, targets = rng.standard_normal((2, 5, 3)), rng.integers(0, 3, (2, 5))
    flat = F.cross_entropy(logits.reshape(10, 3), targets.reshape(10))
    assert F.cross_entropy(logits, targets).item() == flat.item()


def test_no_examples_give_loss_zero_and_gradients_of_zero() -> None:
    x, w = Tensor(np.zeros((0, 4), np.float32)), Tensor(np.ones((3, 4), np.float32), requires_grad=True)
    b = Tensor(np.ones(3, np.float32), requires_grad=True)
    loss = F.cross_entropy(F.linear(x, w, b), np.zeros(0, np.int64))
    loss.backward()
    assert loss.item() == 0.0
    close(w.grad, np.zeros((3, 4)))
    close(b.grad, np.zeros(3))


def test_minus_infinity_masks_a_logit() -> None:
    x = Tensor(np.array([[0.0, -np.inf, 0.0]]), requires_grad=True)
    F.cross_entropy(x, [0]).backward()
    close(x.grad, [[-0.5, 0.0, 0.5]])
    close(F.softmax(x).data, [[0.5, 0.0, 0.5]])


def test_gelu_of_large_values_is_the_value_or_zero() -> None:
    x = Tensor(np.array([-1e4, -50.0, 50.0, 1e4], np.float32), requires_grad=True)
    y = F.gelu(x)
    y.sum().backward()
    close(y.data, [0, 0, 50, 1e4])
    close(x.grad, [0, 0, 1, 1])


def test_dropout_draws_on_the_host_and_keeps_the_mean() -> None:
    x = np.ones((200, 200), np.float32)
    y = F.dropout(x, 0.25, np.random.default_rng(5)).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    assert y.mean() == pytest.approx(1.0, abs=0.01)
    double = F.dropout(x.astype(np.float64), 0.25, np.random.default_rng(5)).numpy()
    assert ((y == 0) == (double == 0)).all()
    t = Tensor(x)
    assert F.dropout(t, 0.0, np.random.default_rng(5)) is F.dropout(t, 0.5, None) is t


def test_layer_norm_has_mean_bias_and_standard_deviation_gain() -> None:
    x = Tensor((1000 + rng.standard_normal((4, 256))).astype(np.float32))
    y = F.layer_norm(x, np.full(256, 2, np.float32), np.full(256, 3, np.float32)).numpy()
    close(xp.asarray(y.mean(-1)), np.full(4, 3), 1e-3)
    close(xp.asarray(y.std(-1)), np.full(4, 2), 1e-3)


def test_linear_is_one_node_and_its_gradients_are_two_dimensional_products() -> None:
    x, w = (Tensor(rng.standard_normal(s).astype(np.float32), requires_grad=True) for s in [(2, 5, 4), (3, 4)])
    b = Tensor(rng.standard_normal(3).astype(np.float32), requires_grad=True)
    y = F.linear(x, w, b)
    assert y.node is not None
    assert y.node.targets == (x, w, b)
    g = rng.standard_normal((2, 5, 3)).astype(np.float32)
    y.backward(g)
    flat, ten = xp.asarray(g).reshape(10, 3), x.data.reshape(10, 4)
    assert to_host(w.grad).tobytes() == to_host(flat.T @ ten).tobytes()
    assert to_host(x.grad).tobytes() == to_host((flat @ w.data).reshape(2, 5, 4)).tobytes()


@given(ids=st.lists(st.integers(0, 6), max_size=40))
def test_scatter_add_adds_every_row_once_in_an_order_that_repeats(ids: list[int]) -> None:
    at = np.array(ids, np.int64)
    whole = np.random.default_rng(len(ids)).integers(-9, 9, (len(ids), 2)).astype(np.float64)
    expected = np.zeros((7, 2))
    np.add.at(expected, at, whole)
    assert (to_host(scatter_add(7, xp.asarray(at), xp.asarray(whole))) == expected).all()  # integers: exact
    real = xp.asarray(np.random.default_rng(len(ids)).standard_normal((len(ids), 2)).astype(np.float32))
    first, second = (to_host(scatter_add(7, xp.asarray(at), real)) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_scatter_add_of_one_row_repeated_a_hundred_thousand_times_is_quick_and_exact() -> None:
    ones = xp.ones((100_000, 1), np.float32)
    assert float(scatter_add(2, xp.ones(100_000, np.int64), ones)[1, 0]) == 100_000


def test_indexing_an_array_without_axes_or_with_too_many_fails_at_once_also_for_a_parameter() -> None:
    w = Parameter(np.ones((2, 3)))
    for key in (5, (0, 0, 0)):
        with pytest.raises(IndexError):
            w[key]
    with pytest.raises(ValueError):
        w.reshape(4)
