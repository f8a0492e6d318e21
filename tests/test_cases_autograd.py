"""The cases about autograd (29-31, 33-35; 32 is in test_frozen.py) and their relatives, each with the right value."""

from __future__ import annotations

import gc
import time
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import minizero as mz
from minizero import Tensor, nn
from minizero import functional as F
from minizero.backend import to_host, xp
from test_autograd import no_collector

f4 = np.float32
INF, NAN = np.inf, np.nan


def leaf(values: Any, dtype: Any = np.float64) -> Tensor:
    return Tensor(np.array(values, dtype), requires_grad=True)


def grad(x: Tensor) -> Any:
    assert x.grad is not None, "no gradient came here"
    return to_host(x.grad)


def is_exactly(got: Any, wanted: Any) -> None:
    """Same shape, same values; nan where nan is wanted."""
    assert np.shape(got) == np.shape(wanted), f"shape {np.shape(got)} instead of {np.shape(wanted)}"
    np.testing.assert_array_equal(got, wanted)


# Case 29


@pytest.mark.parametrize("order", ["sum first", "product first"])
@pytest.mark.parametrize("made", ["x + y", "y + x", "x - (-y)"])
def test_siblings_do_not_share_a_gradient_that_one_of_them_adds_to(order: str, made: str) -> None:
    """z = x + y; L = sum(z) + sum(x * c): dy stays ones, dx is 1 + c."""
    x, y, c = leaf([1, 2, 3]), leaf([4, 5, 6]), np.array([7.0, 8.0, 9.0])
    product = (x * c).sum() if order == "product first" else None
    z = {"x + y": lambda: x + y, "y + x": lambda: y + x, "x - (-y)": lambda: x - (-y)}[made]()
    product = (x * c).sum() if product is None else product
    (z.sum() + product).backward()
    is_exactly(grad(y), [1, 1, 1])
    is_exactly(grad(x), [8, 9, 10])
    grad(x)[0] = 77  # and what the user does with one is no matter of the other
    is_exactly(grad(y), [1, 1, 1])


# Case 30


def test_what_is_used_twice_and_twice_again_has_gradient_four() -> None:
    a = leaf([1, 2])
    b = a + a
    c = b + b
    c.sum().backward()
    is_exactly(grad(a), [4, 4])


SHAPES = [((1,), (5, 4)), ((4, 1), (1, 4)), ((), (2,)), ((1, 1), (3,)), ((2, 1, 3), (4, 1)), ((1,), (0, 3))]


@pytest.mark.parametrize(("one", "two"), SHAPES)
def test_a_broadcast_input_has_a_gradient_of_its_own_shape(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    """Of the sum: how often each element was repeated. Of x * y: the sum of the other's elements that it met."""
    whole = np.broadcast_shapes(one, two)
    x, y = leaf(np.arange(1.0, 1 + np.prod(one)).reshape(one)), leaf(np.arange(2.0, 2 + np.prod(two)).reshape(two))
    (x + y).sum().backward()
    for this in (x, y):
        is_exactly(grad(this), np.full(this.shape, np.prod(whole) / max(this.size, 1)))
        this.grad = None
    (x * y).sum().backward()
    for this, other in ((x, y), (y, x)):
        met = np.broadcast_to(other.numpy(), whole)
        while met.ndim > this.ndim:
            met = met.sum(axis=0)
        axes = tuple(i for i, length in enumerate(this.shape) if length == 1)
        is_exactly(grad(this), met.sum(axis=axes, keepdims=True))


# Case 31


def chain(x: Tensor, operations: int = 50_000) -> tuple[Tensor, weakref.ref[Tensor]]:
    """x doubled and halved again and again, which is exact; and a look at the first result."""
    first = weakref.ref(x)
    for i in range(operations):
        x = x * (0.5 if i % 2 else 2.0)
        if not i:
            first = weakref.ref(x)
    return x, first


def test_backward_goes_through_fifty_thousand_operations_and_what_is_left_is_deleted() -> None:
    x = leaf([3, -5])
    with no_collector():
        end, first = chain(x)
        is_exactly(end.numpy(), [3, -5])
        assert first() is None, "a result that nobody holds any more is alive, beside its node"
        end.backward([1.0, 10.0])
        is_exactly(grad(x), [1, 10])
        last = weakref.ref(end)
        del end
        assert last() is None


def test_a_chain_of_fifty_thousand_operations_that_never_ran_backward_is_deleted_with_its_last_name() -> None:
    x = leaf([3])
    with no_collector():
        before = len(gc.get_objects())
        end, _ = chain(x)
        assert len(gc.get_objects()) - before > 50_000
        del end
        assert len(gc.get_objects()) - before < 10


def test_one_operation_may_have_fifty_thousand_inputs() -> None:
    x = leaf([1.0])
    F.concatenate([x] * 50_000).sum().backward()
    is_exactly(grad(x), [50_000])


def test_a_graph_with_more_paths_than_atoms_is_walked_once_per_operation() -> None:
    """b = b + b, 200 times: 2^200 paths lead back to a."""
    a = leaf([1.0])
    b = a
    for _ in range(200):
        b = b + b
    start = time.monotonic()
    b.backward()
    assert time.monotonic() - start < 5
    is_exactly(grad(a), [2.0**200])


# Case 33


def test_a_second_backward_is_refused_and_adds_nothing() -> None:
    x = leaf([1, 2])
    loss = (x * x).sum()
    loss.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"backward ran already through this graph.*compute the result again"):
            loss.backward()
    is_exactly(grad(x), [2, 4])
    shared = x * x
    one, two = shared.sum(), (shared * 3.0).sum()
    one.backward()
    with pytest.raises(RuntimeError, match="ran already"):
        two.backward()
    is_exactly(grad(x), [4, 8])


def test_backward_of_more_than_one_number_needs_a_gradient_of_its_shape() -> None:
    x = leaf([1, 2])
    for call in (lambda: (x * 2.0).backward(), lambda: x.backward()):
        with pytest.raises(ValueError, match=r"shape \(2,\) is not a single number: pass gradient="):
            call()
    for wrong in (1.0, [1.0], [[1.0, 1.0]], [1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match=r"gradient has shape .* the tensor has \(2,\)"):
            (x * 2.0).backward(wrong)
    with pytest.raises(ValueError, match="does not depend on anything that requires a gradient"):
        (Tensor([1.0, 2.0]) * 2.0).sum().backward()
    assert x.grad is None
    (x * 2.0).backward([1.0, 10.0])
    is_exactly(grad(x), [2, 20])


SCALARS = [2, 2.0, np.float64(2), np.float32(2), np.float16(2), np.int64(2), np.uint8(2), np.array(2.0), np.array(2)]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}-{np.asarray(s).dtype}")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_numpy_scalar_keeps_the_tensors_dtype_and_gradient_on_either_side(scalar: Any, dtype: str) -> None:
    """np.float64 * tensor must neither be NumPy's product nor make a float32 model float64."""
    table: list[tuple[Callable[[Tensor], Any], list[float], float]] = [
        (lambda x: scalar * x, [2, 8], 2), (lambda x: x * scalar, [2, 8], 2),
        (lambda x: scalar + x, [3, 6], 1), (lambda x: x + scalar, [3, 6], 1),
        (lambda x: scalar - x, [1, -2], -1), (lambda x: x - scalar, [-1, 2], 1),
        (lambda x: x / scalar, [0.5, 2], 0.5),
    ]  # fmt: skip
    for call, values, slope in table:
        x = leaf([1, 4], dtype)
        result = call(x)
        assert isinstance(result, Tensor) and result.dtype == dtype, f"{type(result).__name__} of {result.dtype}"
        is_exactly(result.numpy(), values)
        result.sum().backward()
        assert grad(x).dtype == dtype
        is_exactly(grad(x), [slope, slope])
    x = leaf([1, 4], dtype)
    quotient = scalar / x
    assert isinstance(quotient, Tensor) and quotient.dtype == dtype
    quotient.sum().backward()
    is_exactly(grad(x), [-2, -0.125])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_integers_cannot_require_gradients(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"only floating-point tensors can require gradients, this one is {dtype}"):
        Tensor(np.ones(3, dtype), requires_grad=True)
    x = leaf([2, 3, 4])
    (x * Tensor(np.arange(3).astype(dtype))).sum().backward()  # but they may take part
    is_exactly(grad(x), np.arange(3).astype(dtype))


def test_numpy_functions_refuse_a_tensor_instead_of_losing_its_gradient() -> None:
    x: Any = leaf([1, 4])
    table: list[Callable[[], Any]] = [
        lambda: np.exp(x), lambda: np.add(x, 1), lambda: np.multiply(np.ones(2), x), lambda: np.sum(x),
        lambda: np.mean(x), lambda: np.max(x), lambda: np.matmul(np.ones(2), x), lambda: np.maximum(x, 0),
    ]  # fmt: skip
    for number, call in enumerate(table):
        with pytest.raises(TypeError):
            pytest.fail(f"number {number} gave {call()!r}")
    array = np.ones(2)
    with pytest.raises(TypeError):
        array *= x
    is_exactly(array, [1, 1])


def test_augmented_assignment_makes_a_new_tensor_and_changes_none() -> None:
    """y += 1 is y = y + 1: whoever else holds y, as an operation does, keeps what it had."""
    x = leaf([1, 2])
    y = x * 3.0
    other, square = y, (y * y).sum()
    y += 10.0
    y *= x
    is_exactly(other.numpy(), [3, 6])
    is_exactly(y.numpy(), [13, 32])
    square.backward()
    is_exactly(grad(x), [18, 36])


# Case 34


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_enormous_logits_have_the_right_loss_and_gradient(size: float, dtype: str) -> None:
    """The right class by far: loss 0, gradient 0. The wrong one: loss 2 size, gradient (1, -1). A tie of two: ln 2."""
    rows = [[size, -size], [size, -size], [size, size], [-size, -size]]
    for row, target, wanted, slope in zip(
        rows,
        (0, 1, 0, 1),
        (0, 2 * size, np.log(2), np.log(2)),
        ([0, 0], [1, -1], [-0.5, 0.5], [0.5, -0.5]),
        strict=True,
    ):
        logits = leaf([row], dtype)
        loss = F.cross_entropy(logits, np.array([target]))
        loss.backward()
        np.testing.assert_allclose(loss.item(), wanted, rtol=1e-7 if dtype == "float32" else 1e-15)
        is_exactly(grad(logits), [slope])
    logits = leaf(rows, dtype)
    chosen = F.log_softmax(logits)[np.arange(4), np.array([0, 1, 0, 1])]
    np.testing.assert_allclose(chosen.numpy(), [0, -2 * size, -np.log(2), -np.log(2)], rtol=1e-7)
    chosen.sum().backward()
    is_exactly(grad(logits), [[0, 0], [-1, 1], [0.5, -0.5], [-0.5, 0.5]])
    is_exactly(F.softmax(logits).numpy(), [[1, 0], [1, 0], [0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize("stage", mz.STAGES, ids=lambda stage: stage.__name__)
def test_a_model_whose_logits_have_become_enormous_goes_on_training(stage: type[mz.Engine]) -> None:
    """Weights of ±1e8: the step is not refused, and takes the wrong answer back by lr times its gradient."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.init = lambda generator, count: np.array([1e8, -1e8], f4)
    engine = stage(layer, mz.SGD(1e7), mz.Communicator())
    loss = F.cross_entropy(engine(np.ones((1, 1), f4)), np.array([1]))
    assert loss.item() == 2e8
    engine.backward(loss)
    engine.step()
    is_exactly(engine.gather_parameters()["weight"], [[9e7], [-9e7]])


def test_at_zero_values_and_gradients_are_those_that_are_documented() -> None:
    """functional.py: log is -inf, log' and sqrt' are inf; relu' is 0. Powers as IEEE has them; -0.0 is 0."""
    table: list[tuple[str, Callable[[Tensor], Tensor], float, float]] = [
        ("sqrt", lambda x: x.sqrt(), 0, INF), ("log", lambda x: x.log(), -INF, INF), ("relu", F.relu, 0, 0),
        ("x ** 0.5", lambda x: x**0.5, 0, INF), ("x ** 0", lambda x: x**0, 1, 0), ("x ** 1", lambda x: x**1, 0, 1),
        ("x ** 2", lambda x: x**2, 0, 0), ("exp", lambda x: x.exp(), 1, 1), ("tanh", lambda x: x.tanh(), 0, 1),
        ("gelu", F.gelu, 0, 0.5), ("where x > 0", lambda x: F.where(x.data > 0, x, 2.0), 2, 0),
    ]  # fmt: skip
    for name, call, value, slope in table:
        for zero in (0.0, -0.0):
            x = leaf([zero])
            with np.errstate(all="ignore"):
                y = call(x)
                y.sum().backward()
            assert y.item() == value, f"{name} at {zero}: {y.item()} instead of {value}"
            if (name, zero) not in (("sqrt", -0.0), ("log", -0.0)):  # there, the sign of the zero makes it -inf
                assert grad(x)[0] == slope, f"the gradient of {name} at {zero} is {grad(x)[0]} instead of {slope}"


def test_where_gives_what_was_not_taken_a_gradient_of_zero_whatever_comes_back() -> None:
    for upstream in (INF, -INF, NAN, 1.0):
        x, y = leaf([1, 2]), leaf([3, 4])
        F.where(np.array([True, False]), x, y).backward([upstream, upstream])
        is_exactly(grad(x), [upstream, 0])
        is_exactly(grad(y), [0, upstream])


def test_sqrt_behind_where_is_nan_at_zero_and_the_usual_remedy_helps() -> None:
    """The gradient 0 of what was not taken meets sqrt' = inf, and 0 times inf is nan. Take the root of a safe x."""
    x = leaf([0, 4])
    with np.errstate(all="ignore"):
        F.where(x.data > 0, x.sqrt(), 0.0).sum().backward()
    is_exactly(grad(x), [NAN, 0.25])
    x.grad = None
    F.where(x.data > 0, F.where(x.data > 0, x, 1.0).sqrt(), 0.0).sum().backward()
    is_exactly(grad(x), [0, 0.25])


# Case 35


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), F.gelu, nn.Dropout(0.1), nn.Linear(64, 10), seed=1)


class Training:
    """A step leaves 16 KiB of activations and more behind, if it leaves its graph."""

    def __init__(self, stage: type[mz.Engine]) -> None:
        self.engine = stage(model(), mz.Adam(), mz.Communicator())
        generator = np.random.default_rng(0)
        self.x, self.y = generator.standard_normal((64, 32)).astype(f4), generator.integers(0, 10, 64)

    def loss(self) -> Tensor:
        return F.cross_entropy(self.engine(self.x), self.y)

    def step(self) -> Tensor:
        loss = self.loss()
        self.engine.backward(loss)
        self.engine.clip_grad_norm(1.0)
        self.engine.step()
        return loss

    def evaluation_with_a_graph(self) -> None:
        self.loss()

    def forward_that_fails(self) -> None:
        with suppress(IndexError):
            F.cross_entropy(self.engine(self.x), self.y + 99)

    def backward_that_fails(self) -> None:
        with suppress(ValueError):
            self.engine.backward(self.engine(self.x), gradient=np.ones(3))

    def step_that_is_refused(self) -> None:
        self.engine.backward(self.loss() * NAN)
        with suppress(FloatingPointError):
            self.engine.step()
        self.engine.zero_grad()


def growth(action: Callable[[], Any], times: int = 100) -> tuple[int, int]:
    """What `times` more calls leave behind: bytes in arrays, and Python objects."""

    def alive() -> tuple[int, int]:
        arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        return sum(trace.size for trace in traces), len(gc.get_objects())

    tracemalloc.start()
    try:
        for _ in range(3):
            action()
        before = alive()
        for _ in range(times):
            action()
        after = alive()
    finally:
        tracemalloc.stop()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.skipif(xp is not np, reason="tracemalloc sees host memory")
@pytest.mark.parametrize("stage", [mz.DataParallel, mz.Zero3], ids=lambda stage: stage.__name__)
def test_live_memory_is_flat_over_a_hundred_steps_without_the_garbage_collector(stage: type[mz.Engine]) -> None:
    """Dropped losses leave nothing at all. A kept one keeps its number, its Tensor and its spent node."""
    training = Training(stage)
    losses: list[Tensor] = []
    with no_collector():
        size, objects = growth(training.step)
        assert size == 0 and objects < 10, f"100 steps leave {size} bytes in arrays and {objects} objects behind"
        size, objects = growth(lambda: losses.append(training.step()))
    assert len(losses) == 103 and losses[-1].item() < losses[0].item()
    assert size <= 100 * 8 and objects < 310, f"100 kept losses keep {size} bytes in arrays and {objects} objects"


@pytest.mark.skipif(xp is not np, reason="tracemalloc sees host memory")
def test_live_memory_is_flat_also_where_forward_backward_or_step_fail() -> None:
    training = Training(mz.Zero3)
    actions = (training.evaluation_with_a_graph, training.forward_that_fails, training.backward_that_fails,
               training.step_that_is_refused)  # fmt: skip
    with no_collector(), np.errstate(all="ignore"):
        for action in actions:
            size, objects = growth(action, 30)
            assert size == 0 and objects < 10, f"30 times {action.__name__} leave {size} bytes, {objects} objects"


# Relatives


def test_one_tensor_may_be_all_inputs_of_an_operation() -> None:
    """Each role's share counts: x * x is 2x, x - x nothing; for products of matrices G Xᵀ + Xᵀ G, with G ones."""
    square = np.array([[1.0, 2.0], [3.0, 4.0]])
    ones = np.ones((2, 2))
    table: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
        "x * x": (lambda x: x * x, 2 * square),
        "x - x": (lambda x: x - x, 0 * square),
        "x / x": (lambda x: x / x, 0 * square),
        "x @ x": (lambda x: x @ x, ones @ square.T + square.T @ ones),
        "x @ x.T": (lambda x: x @ x.T, 2 * (ones @ square)),
        "linear(x, x)": (lambda x: F.linear(x, x), 2 * (ones @ square)),
        "where(c, x, x)": (lambda x: F.where(square > 2, x, x), ones),
        "concatenate": (lambda x: F.concatenate([x, x, x]), 3 * ones),
        "mse_loss(x, x)": (lambda x: F.mse_loss(x, x), 0 * square),
        "x[0] + x[0:1]": (lambda x: x[0] + x[0:1], [[2, 2], [0, 0]]),
        "the same row three times": (lambda x: x[np.array([1, 1, -1])], [[0, 0], [3, 3]]),
    }
    for name, (call, wanted) in table.items():
        x = leaf(square)
        call(x).sum().backward()
        np.testing.assert_allclose(grad(x), wanted, atol=1e-15, err_msg=name)


def test_a_gradient_is_an_array_of_its_own_whoever_gave_it() -> None:
    """The caller's seed, a view that repeats one number, another leaf's gradient: none of them is `grad`."""
    x, y, seed = leaf([1, 2]), leaf([3, 4]), xp.ones(2)
    (x + y).backward(seed)
    seed[:] = 9
    is_exactly(grad(x), [1, 1])
    x.grad += 1.0  # type: ignore[operator]  # in place
    is_exactly(grad(y), [1, 1])
    z = leaf([1, 2])
    z.sum().backward()
    assert z.grad is not None
    z.grad[0] = 5
    is_exactly(grad(z), [5, 1])
    kept = z.grad
    z.sum().backward()
    is_exactly(to_host(kept), [5, 1])  # adding to a gradient does not change what somebody has kept
    is_exactly(grad(z), [6, 2])
