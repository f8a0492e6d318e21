"""Does a Tensor remember how it was made, run backward once, in order, and keep nothing that it need not?"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from minizero import functional as F
from minizero.autograd import Node, Tensor, Watcher, backward, no_grad, record
from minizero.backend import Array, bfloat16, to_host, xp
from minizero.parameter import View

rng = np.random.default_rng(0)


class Parameter(Tensor):
    """A parameter as the engine sees it: its array comes and goes."""

    def __init__(self, array: Any, requires_grad: bool = True) -> None:
        super().__init__(array.copy(), requires_grad)
        self._known = self._data.shape

    @property
    def parameter(self) -> Tensor:
        return self

    @property
    def data(self) -> Array:
        if self._data is None:
            raise RuntimeError("released")
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._known)

    def release(self) -> None:
        self._data = None

    def gather(self, array: Any) -> None:
        self._data = xp.asarray(array.copy())


class Log(Watcher):
    """Writes down what backward reports."""

    def __init__(self, **names: Tensor) -> None:
        self.names = {x: name for name, x in names.items()}
        self.lines: list[str] = []
        self.gradients: dict[str, Array | None] = {}

    def reached(self, parameters: list[Tensor]) -> None:
        self.lines.append("reached " + " ".join(sorted(self.names[p] for p in parameters)))

    def needed(self, parameter: Tensor) -> None:
        self.lines.append(f"needed {self.names[parameter]}")

    def finished(self, leaf: Tensor, gradient: Array | None) -> None:
        self.lines.append(f"finished {self.names[leaf]}")
        self.gradients[self.names[leaf]] = gradient


def leaf(*values: float, dtype: Any = np.float64) -> Tensor:
    return Tensor(np.array(values, dtype), requires_grad=True)


def equal(array: Array | None, values: Any) -> None:
    assert array is not None
    np.testing.assert_array_equal(to_host(array), values)


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the garbage collector, only reference counts free memory: a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Gradients add up where a value is used several times


@pytest.mark.parametrize("sum_first", [True, False])
def test_a_gradient_that_two_inputs_share_is_not_changed_by_what_one_of_them_adds(sum_first: bool) -> None:
    x, y, c = leaf(1, 2), leaf(3, 4), np.array([5.0, 6.0])
    if sum_first:
        z = x + y
        scaled = x * c
    else:  # backward comes to x + y first: x holds the array that y holds, when x * c adds its share
        scaled = x * c
        z = x + y
    (z.sum() + scaled.sum()).backward()
    equal(y.grad, [1, 1])
    equal(x.grad, [6, 7])


def test_the_gradients_of_two_leaves_are_two_arrays() -> None:
    x, y, start = leaf(1, 2), leaf(3, 4), xp.ones(2)
    (x + y).backward(start)
    assert x.grad is not None
    x.grad *= 10
    equal(y.grad, [1, 1])
    equal(start, [1, 1])
    z = leaf(1, 2)
    z.sum().backward()
    assert z.grad is not None
    z.grad *= 10  # an array of its own, that may be written to
    equal(z.grad, [10, 10])


def test_a_value_used_twice_gets_both_gradients() -> None:
    a = leaf(1, 2)
    b = a + a
    c = b + b
    c.sum().backward()
    equal(a.grad, [4, 4])
    d = leaf(3)
    (d * d).sum().backward()
    equal(d.grad, [6])


@pytest.mark.parametrize(("one", "two"), [((1,), (5, 4)), ((4, 1), (1, 4)), ((), (2,))])
def test_gradients_of_broadcast_inputs_have_the_inputs_shapes(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    x, y = (Tensor(np.ones(shape), requires_grad=True) for shape in (one, two))
    (x + y).sum().backward()
    size = np.broadcast_shapes(one, two)
    equal(x.grad, np.full(one, np.prod(size) / np.prod(one)))
    equal(y.grad, np.full(two, np.prod(size) / np.prod(two)))


def test_backward_adds_to_grad() -> None:
    x = leaf(1, 2)
    for _ in range(3):
        (x * 2.0).sum().backward()
    equal(x.grad, [6, 6])


def test_gradients_are_arrays_also_without_axes() -> None:
    x = Tensor(np.float64(3), requires_grad=True)
    for expected in (6.0, 12.0):
        (x * x).backward()
        assert isinstance(x.grad, xp.ndarray)
        equal(x.grad, expected)


# Depth, repetition and errors


def test_a_second_backward_says_that_the_graph_is_gone() -> None:
    x = leaf(1, 2)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"at sum.*compute the result again"):
        loss.backward()
    equal(x.grad, [2, 4])


def test_a_second_backward_through_a_shared_part_says_so_too() -> None:
    x = leaf(1, 2)
    shared = x * x
    one, two = shared.sum(), shared.mean()
    one.backward()
    with pytest.raises(RuntimeError, match="at mul"):
        two.backward()
    equal(x.grad, [2, 4])


def test_backward_needs_one_number_or_a_gradient_of_the_right_shape() -> None:
    x = leaf(1, 2)
    with pytest.raises(ValueError, match=r"\(2,\).*pass gradient="):
        (x * 2.0).backward()
    with pytest.raises(ValueError, match=r"gradient has shape \(3,\), the tensor has \(2,\)"):
        (x * 2.0).backward(np.ones(3))
    with pytest.raises(ValueError, match="does not depend on anything"):
        Tensor(np.ones(2)).sum().backward()
    (x * 2.0).backward([1.0, 10.0])
    equal(x.grad, [2, 20])
    x.grad = None
    (x * 2.0).backward(Tensor(np.ones(2, np.float32)))
    equal(x.grad, [2, 2])
    y = Tensor(np.ones((1, 1)), requires_grad=True)
    (y * 3.0).backward()  # one element, if not without axes
    equal(y.grad, [[3]])


def test_backward_of_a_leaf_is_its_own_gradient() -> None:
    x, start = leaf(1, 2), xp.ones(2)
    x.backward(start)
    equal(x.grad, [1, 1])
    assert x.grad is not start


def test_only_floating_point_tensors_can_require_gradients() -> None:
    for array in (np.arange(3), np.array([True])):
        with pytest.raises(TypeError, match=rf"only floating-point.*{array.dtype}"):
            Tensor(array, requires_grad=True)
    for dtype in (np.float32, np.float64, bfloat16):
        assert Tensor(np.ones(2).astype(dtype), requires_grad=True).requires_grad


def test_numpy_scalars_and_arrays_leave_the_operator_to_the_tensor() -> None:
    x = leaf(1, 2, dtype=np.float32)
    for result in (np.float64(2) * x, x * np.float64(2), np.array(2.0) * x, x * np.array(2.0), 2 * x):
        assert isinstance(result, Tensor)
        assert result.dtype == np.float32
        equal(result.data, [2, 4])
    y = np.ones((2, 2), np.float32) @ x
    assert isinstance(y, Tensor)
    equal(y.data, [3, 3])
    equal((np.ones(2, np.float32) - x).data, [0, -1])


def test_a_tensor_behaves_like_the_array_it_holds() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3))
    assert (x.shape, x.ndim, x.size, len(x), x.dtype.name) == ((2, 3), 2, 6, 2, "float64")
    assert x.sum().item() == float(x.sum()) == 15.0
    assert bool(Tensor(1.0)) and not Tensor(0.0)
    with pytest.raises(ValueError, match=r"one element.*\(2, 3\)"):
        x.item()
    with pytest.raises(TypeError, match="without axes"):
        len(Tensor(1.0))
    assert xp.array_equal(x.detach().data, x.data) and not xp.shares_memory(x.detach().data, x.data)
    assert "requires_grad" in repr(leaf(1)) and "mul" in repr(leaf(1) * 2)


# Order


def test_nodes_run_in_reverse_order_of_creation() -> None:
    order: list[int] = []

    def step(number: int, *inputs: Tensor) -> Tensor:
        def share(g: Array) -> tuple[Array, ...]:
            order.append(number)
            return (g,) * len(inputs)

        return record(Tensor(inputs[0].data), inputs, share, f"step {number}")

    x = leaf(1)
    one = step(1, x)
    two = step(2, x)
    three = step(3, two)  # depth-first order would run 1 before 2 and 3, or finish 3 before 4
    four = step(4, one, three)
    five = step(5, one)
    step(6, four, five, two).backward()
    assert order == [6, 5, 4, 3, 2, 1]
    equal(x.grad, [4])


def network() -> tuple[Parameter, Parameter, Parameter, Tensor]:
    """Two layers; the first is used twice, with a frozen scale in between."""
    a, frozen, b = (Parameter(rng.standard_normal((3, 3)), requires_grad=i != 1) for i in range(3))
    x = Tensor(rng.standard_normal((2, 3)))
    h = F.relu(F.linear(x, a))
    h = h @ frozen
    h = F.linear(h, b)
    return a, frozen, b, F.linear(h, a).sum()


def test_the_watcher_hears_of_parameters_reached_then_needed_then_finished_each_once() -> None:
    a, frozen, b, loss = network()
    log = Log(a=a, frozen=frozen, b=b)
    backward(loss, watcher=log)
    assert log.lines == [
        "reached a b frozen", "needed a", "needed b", "finished b", "needed frozen", "finished frozen",
        "needed a", "finished a",
    ]  # fmt: skip
    assert log.gradients["frozen"] is None
    assert log.gradients["a"] is not None and log.gradients["b"] is not None
    assert a.grad is b.grad is None  # a watcher that listens keeps what it wants to keep


def test_a_parameter_finishes_with_its_last_user_also_through_views() -> None:
    w, v, x = Parameter(rng.standard_normal((3, 3))), Parameter(rng.standard_normal(3)), leaf(1, 2, 3)
    early = w.T
    h = x @ early
    h = h * v
    loss = (h @ w[0:3]).sum()
    log = Log(w=w, v=v, x=x)
    backward(loss, watcher=log)
    # matmul and the view w[0:3]; mul; matmul, then the view w.T, the first to be made and so the last to run
    assert log.lines == [
        "reached v w",
        "needed w",
        "needed w",
        "needed v",
        "finished v",
        "needed w",
        "finished x",
        "needed w",
        "finished w",
    ]  # fmt: skip or so


def test_a_parameter_that_no_gradient_arrives_at_finishes_without_one() -> None:
    w, x = Parameter(np.ones(2)), leaf(1, 2)

    def silent(g: Array) -> tuple[None, Array]:
        return None, g

    y = record(Tensor(x.data), (w, x), silent, "silent")
    log = Log(w=w, x=x)
    backward(y.sum(), watcher=log)
    assert log.gradients["w"] is None
    assert log.lines[0] == "reached w"


def test_gradients_are_gone_from_backward_once_they_were_reported() -> None:
    alive: list[weakref.ref[Any]] = []

    class Keeper(Watcher):
        most = 0

        def finished(self, leaf: Tensor, gradient: Array | None) -> None:
            self.most = max(self.most, sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(gradient))

    weights = [Parameter(rng.standard_normal((4, 4))) for _ in range(5)]
    h = Tensor(rng.standard_normal((2, 4)))
    for w in weights:
        h = F.tanh(F.linear(h, w))
    keeper = Keeper()
    backward(h.sum(), watcher=keeper)
    assert len(alive) == 5
    assert keeper.most == 0


# Views and what is kept


def test_a_view_of_a_parameter_looks_its_base_up_at_each_use() -> None:
    w = Parameter(np.arange(6.0).reshape(2, 3))
    views: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
        "T": (w.T, lambda a: a.T),
        "index": (w[1:], lambda a: a[1:]),
        "number": (w[1], lambda a: a[1]),
        "reshape": (w.reshape(3, 2), lambda a: a.reshape(3, 2)),
        "swapaxes": (w.swapaxes(0, 1), lambda a: a.T),
        "twice": (w.T[1:].reshape(4), lambda a: a.T[1:].reshape(4)),
    }
    new = np.arange(6.0, 12.0).reshape(2, 3)
    w.gather(new)
    for view, look in views.values():
        assert isinstance(view, View)
        assert view.parameter is w
        equal(view.data, look(new))
    w.release()
    for view, _ in views.values():
        with pytest.raises(RuntimeError, match="released"):
            view.data  # noqa: B018


def test_the_same_operations_on_a_tensor_give_tensors_that_share_its_array() -> None:
    x = leaf(1, 2, 3, 4)
    for result in (x.T, x[1:], x.reshape(2, 2)):
        assert type(result) is Tensor
        assert np.shares_memory(result.numpy(), x.numpy()) or not isinstance(x.data, np.ndarray)
    assert type(Parameter(np.ones((2, 2)))[np.array([0, 0])]) is Tensor  # a copy is no view
    assert type(Parameter(np.ones(2)) * 2.0) is Tensor


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "x @ w": lambda x, w: x @ w,
    "w @ x": lambda x, w: w @ x,
    "x @ w.T": lambda x, w: x @ w.T,
    "x @ w[1:3]": lambda x, w: x[:, 1:3] @ w[1:3],
    "x * w[i]": lambda x, w: x * w[2],
    "x @ w.reshape": lambda x, w: x @ w.reshape(2, 8).reshape(4, 4),
    "x @ w.swapaxes[...]": lambda x, w: x @ w.swapaxes(0, 1)[:, :],
    "x * w": lambda x, w: x * w,
    "x / w": lambda x, w: x / w,
    "w ** 3": lambda x, w: x + w**3,
    "log(exp(w))": lambda x, w: x + w.exp().log(),
    "gelu(w)": lambda x, w: x + F.gelu(w),
    "w[ids]": lambda x, w: x + w[np.array([0, 0, 3, 1])],
    "layer_norm": lambda x, w: F.layer_norm(x, w[0], w[1]),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("use", USES)
def test_a_released_parameters_array_dies_and_backward_uses_the_one_gathered_anew(use: str, frozen: bool) -> None:
    value, factor = rng.uniform(0.5, 1.5, (4, 4)), rng.standard_normal((4, 4))

    def run(release: bool) -> list[Any]:
        x, w = Tensor(factor, requires_grad=True), Parameter(value, requires_grad=not frozen)
        loss = (F.tanh(USES[use](x, w)) * factor).sum()
        if release:
            array = weakref.ref(w.data)
            w.release()
            assert array() is None
            w.gather(value)
        loss.backward()
        assert (w.grad is None) == frozen
        return [to_host(leaf.grad).tobytes() for leaf in (x, w) if leaf.grad is not None]

    assert run(release=True) == run(release=False)


def test_without_recording_a_view_of_a_parameter_still_belongs_to_it() -> None:
    w, x = Parameter(np.eye(2)), leaf(1, 2)
    with no_grad():
        turned = w.T
    assert isinstance(turned, View)
    log = Log(w=w, x=x)
    backward((x @ turned).sum(), watcher=log)
    assert "needed w" in log.lines
    assert log.gradients["w"] is None


# Memory


def live() -> tuple[int, int]:
    """Bytes in arrays, and how many Tensors and Nodes there are."""
    count = sum(isinstance(x, (Tensor, Node)) for x in gc.get_objects())
    if xp is not np:
        return int(xp.get_default_memory_pool().used_bytes()), count
    arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces), count


def growth(steps: int, losses: list[Tensor] | None = None, run_backward: bool = True) -> tuple[int, int]:
    """What `steps` training steps leave behind, in `live()`; their losses are kept in `losses`."""
    w = [Parameter(rng.standard_normal((64, 64)).astype(np.float32)) for _ in range(3)]
    x, t = rng.standard_normal((32, 64)).astype(np.float32), rng.integers(0, 64, 32)
    gain = Parameter(np.ones(64, np.float32))

    def step() -> None:
        h = F.embedding(w[0], t) + x
        h = F.layer_norm(h, gain, gain)
        h = F.gelu(F.linear(h, w[1])) + F.relu(h @ w[1].T)
        h = F.softmax(h.reshape(4, 8, 64) @ h.reshape(4, 8, 64).swapaxes(-1, -2)) @ h.reshape(4, 8, 64)
        h = F.dropout(F.concatenate([h, h], axis=0)[:4], 0.1, np.random.default_rng(0)).reshape(32, 64)
        loss = F.cross_entropy(F.linear(h, w[2]), t) + (w[0] ** 2).mean() / 2
        if run_backward:
            loss.backward()
        for p in (*w, gain):
            p.grad = None
        if losses is not None:
            losses.append(loss)

    tracemalloc.start()
    try:
        step()
        before = live()
        for _ in range(steps):
            step()
        after = live()
    finally:
        tracemalloc.stop()
    return after[0] - before[0], after[1] - before[1]


def test_live_memory_is_flat_over_a_hundred_steps_without_the_garbage_collector() -> None:
    with no_collector():
        assert growth(100) == (0, 0)


def test_a_kept_loss_keeps_its_number_and_its_spent_node_and_no_more() -> None:
    losses: list[Tensor] = []
    with no_collector():
        size, count = growth(100, losses)
    assert size <= 100 * losses[0].data.nbytes
    assert count == 200


def test_a_graph_that_never_ran_backward_goes_with_its_loss() -> None:
    with no_collector():
        assert growth(20, run_backward=False) == (0, 0)


def test_backward_frees_activations_as_it_goes() -> None:
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []

    def count(g: Array) -> tuple[Array]:
        counts.append(sum(ref() is not None for ref in alive))
        return (g,)

    x = leaf(*rng.standard_normal(8))
    h = record(Tensor(x.data), (x,), count, "count")  # the first to be made is the last to run
    for _ in range(10):
        h = F.tanh(h * 0.5)
        alive.append(weakref.ref(h.data))
    loss = h.sum()
    del h
    assert sum(ref() is not None for ref in alive) == 10
    loss.backward()
    assert counts == [0]


def test_what_the_user_holds_stays() -> None:
    x = leaf(1, 2)
    middle = x * 3.0
    (middle * middle).sum().backward()
    equal(middle.data, [3, 6])
    assert isinstance(middle.node, Node)
    assert middle.node.backward is None


# no_grad


def test_nothing_is_recorded_inside_no_grad_also_after_an_error_and_when_nested() -> None:
    x = leaf(1, 2)
    with no_grad():
        assert (x * 2.0).node is None
        with no_grad():
            pass
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert (x * 2.0).requires_grad


def test_detach_stops_gradients() -> None:
    x = leaf(1, 2)
    (x.detach() * x).sum().backward()
    equal(x.grad, [1, 2])
