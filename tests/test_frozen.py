"""Autograd: an array that is changed in place after an operation saved it gives an error or the right gradient."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.autograd import Tensor
from minizero.backend import to_host, xp
from test_functional import CASES, Case, weights_like

GARBAGE = 1e9
each_case = pytest.mark.parametrize("case", CASES, ids=str)
refuses = pytest.raises(ValueError, match="read-only")
on_numpy = pytest.mark.numpy  # which alone can make an array read-only


def spoil(array: Any) -> None:
    """Write garbage of the array's dtype to every element."""
    array[...] = (array.astype("float32") * 0 + GARBAGE).astype(array.dtype) if array.dtype.kind == "f" else 0


@each_case
def test_a_buffer_may_be_used_again_as_soon_as_an_operation_returns(case: Case) -> None:
    others = range(len(case.arrays))
    for wanted in others:  # one operand is differentiated, the others are the caller's own arrays
        truth = [Tensor(a, requires_grad=i == wanted) for i, a in enumerate(case.arrays)]
        expected = case.call(*truth)
        expected.backward(weights_like(expected))

        buffers = [xp.array(a) for a in case.arrays]
        leaf = Tensor(buffers[wanted], requires_grad=True)
        result = case.call(*(leaf if i == wanted else buffers[i] for i in others))
        for buffer in buffers:
            spoil(buffer)
        result.backward(weights_like(result))
        assert to_host(leaf.grad).tobytes() == to_host(truth[wanted].grad).tobytes()


@on_numpy
@each_case
def test_a_leaf_and_a_result_refuse_to_be_changed_until_backward_has_run(case: Case) -> None:
    leaves = [Tensor(a, requires_grad=True) for a in case.arrays]
    result = case.call(*leaves)
    for tensor in {*leaves, result}:
        if tensor.size and result not in leaves:  # as dropout's that drops nothing
            with refuses:
                spoil(tensor.data)
            with refuses:
                spoil(tensor.numpy()[...])
            with refuses:
                np.add(tensor.data, 1, out=tensor.data)
    result.backward(weights_like(result))
    for leaf in leaves:
        spoil(leaf.data)  # nobody needs it any more


@on_numpy
@each_case
def test_a_constant_refuses_to_be_changed_or_it_makes_no_difference(case: Case) -> None:
    def gradient(change: bool) -> bytes:
        leaf, constants = Tensor(case.arrays[0], requires_grad=True), [Tensor(a) for a in case.arrays[1:]]
        result = case.call(leaf, *constants)
        for constant in constants if change else ():
            with contextlib.suppress(ValueError):  # read-only
                spoil(constant.data)
        result.backward(weights_like(result))
        for constant in constants:
            spoil(constant.data)
        return to_host(leaf.grad).tobytes()

    assert gradient(change=True) == gradient(change=False)


@on_numpy
def test_an_array_is_free_again_when_the_result_is_dropped_and_not_before() -> None:
    x = Tensor(np.ones(3), requires_grad=True)
    first, second = F.exp(x), F.mul(x, x)
    del first
    with refuses:
        spoil(x.data)
    del second
    spoil(x.data)
    with mz.no_grad():
        kept = F.mul(x, x)
    spoil(x.data)
    spoil(kept.data)


SAVED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "targets of cross_entropy": lambda x, ids: F.cross_entropy(x, ids),
    "tokens of embedding": lambda x, ids: F.embedding(x, ids),
    "index": lambda x, ids: x[ids],
    "index in two axes": lambda x, ids: x[ids, ids],
}


@pytest.mark.parametrize("use", SAVED)
@pytest.mark.parametrize("wrap", [lambda a: a, Tensor.of, Tensor], ids=["array", "Tensor of it", "Tensor"])
def test_integers_that_say_where_gradients_go_may_change_at_once(use: str, wrap: Callable[[Any], Any]) -> None:
    def run(change: bool) -> bytes:
        x, ids = Tensor(np.arange(9.0).reshape(3, 3), requires_grad=True), xp.array([2, 0, 1])
        result = SAVED[use](x, wrap(ids))
        if change:
            ids[...] = 1
        result.backward(xp.ones(result.shape) * xp.arange(1.0, result.size + 1).reshape(result.shape))
        return to_host(x.grad).tobytes()

    assert run(change=True) == run(change=False)


@pytest.mark.parametrize("wrap", [lambda a: a, Tensor.of, Tensor], ids=["array", "Tensor of it", "Tensor"])
def test_a_condition_may_change_at_once(wrap: Callable[[Any], Any]) -> None:
    x, condition = Tensor(np.ones(3), requires_grad=True), xp.array([True, False, True])
    result = F.where(wrap(condition), x, 2.0 * x)
    condition[...] = False
    result.backward(xp.ones(3))
    assert to_host(x.grad).tolist() == [1.0, 2.0, 1.0]


def test_a_detached_tensor_and_a_reshaped_constant_have_arrays_of_their_own() -> None:
    x, w = Tensor(np.ones((2, 3))), Tensor(np.full((2, 3), 2.0), requires_grad=True)
    for other in (x.detach(), x.reshape(2, 3), x.T.T, x[:]):
        loss = F.sum(F.mul(w, other))
        spoil(x.data)
        loss.backward()
        assert to_host(w.grad).tolist() == [[1.0] * 3] * 2
        w.grad, x = None, Tensor(np.ones((2, 3)))


@pytest.mark.parametrize("stage", mz.STAGES)
def test_a_step_between_forward_and_backward_is_refused(stage: type[mz.Engine]) -> None:
    def batch(number: int) -> tuple[Any, Any]:
        generator = np.random.default_rng(number)
        return generator.standard_normal((4, 5)).astype("float32"), generator.integers(0, 3, 4)

    engine = stage(nn.MLP([5, 4, 3]), mz.SGD(lr=0.1))
    (x, y), (later_x, later_y) = batch(0), batch(1)
    stale = F.cross_entropy(engine(later_x), later_y)
    engine.backward(F.cross_entropy(engine(x), y))
    engine.step()
    with pytest.raises(RuntimeError, match=r"layers\.\d\.\w+ was changed by step\(\)"):
        engine.backward(stale)
    before = {name: array.tobytes() for name, array in engine.gather_parameters().items()}
    engine.backward(F.cross_entropy(engine(later_x), later_y))  # nothing of the refused one is left
    engine.step()
    assert engine.steps == 2
    assert all(array.tobytes() != before[name] for name, array in engine.gather_parameters().items())


@pytest.mark.parametrize("stage", mz.STAGES)
def test_a_load_between_forward_and_backward_is_refused(stage: type[mz.Engine], tmp_path: Path) -> None:
    model = nn.MLP([5, 4, 3])
    for parameter in model.parameters()[:1] + model.parameters()[2:]:
        parameter.requires_grad = False  # a frozen weight is loaded, too
    engine = stage(model, mz.SGD(lr=0.1))
    engine.save(tmp_path)
    loss = F.cross_entropy(engine(np.ones((2, 5), "float32")), np.array([0, 2]))
    engine.load(tmp_path)
    with pytest.raises(RuntimeError, match=r"layers\.\d\.\w+ was changed by step\(\) or load\(\)"):
        engine.backward(loss)
    assert not any(unit.collecting for unit in engine.units)


@pytest.mark.parametrize("given", [True, False], ids=["leaf", "constant"])
def test_a_view_made_without_recording_has_an_array_of_its_own(given: bool) -> None:
    x, w = Tensor(np.ones((3, 2)), requires_grad=given), Tensor(np.full((2, 3), 2.0), requires_grad=True)
    with mz.no_grad():
        y = x.reshape(2, 3)
    loss = F.sum(F.mul(w, y))
    spoil(x.data)
    loss.backward()
    assert to_host(w.grad).tolist() == [[1.0] * 3] * 2
    spoil(y.data)


@on_numpy
def test_a_weight_is_open_to_its_owner_between_steps_and_closed_within_one() -> None:
    model = nn.MLP([5, 4, 3])
    x, y = np.ones((2, 5), "float32"), np.array([0, 2])
    loss = F.cross_entropy(model(x), y)
    weight = model.layers[0].weight
    with refuses:
        weight.data[...] += 1
    loss.backward()
    assert weight.grad is not None
    weight.data[...] -= 0.1 * weight.grad
    with refuses:
        loss = F.cross_entropy(model(x), y)
        weight.data[0, 0] = 0
    del loss
    weight.data[0, 0] = 0
