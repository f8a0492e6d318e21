"""A unit's vector: where gradients are written."""

import numpy as np
import pytest

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.autograd import Watcher, backward
from minizero.backend import Array, to_host, xp
from minizero.flat import Unit, units_of
from minizero.parameter import Parameter


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Array) -> mz.autograd.Tensor:
        return self.layer(F.relu(self.layer(x)))


class Collecting(Watcher):
    """Hands gradients to their units, and notes which were there already."""

    def __init__(self) -> None:
        self.in_place: dict[str, bool] = {}

    def finished(self, leaf: mz.autograd.Tensor, gradient: Array | None) -> None:
        assert isinstance(leaf, Parameter) and gradient is not None
        unit: Unit = leaf.unit
        part = None if unit.local is None else unit.local[unit.spans[leaf]]
        self.in_place[leaf.name] = part is not None and xp.may_share_memory(gradient, part)
        unit.collect(leaf, gradient)


def gradients(model: nn.Module, times: int = 1) -> tuple[dict[str, Array], dict[str, bool]]:
    """Each parameter's part of the local gradient after `times` backwards, and which were written in place last."""
    model.name_parameters()
    units = units_of(model, 0, 1)
    for unit in units:
        unit.materialise(0)
        unit.collecting = True
    x = xp.asarray(np.random.default_rng(1).standard_normal((3, 4), dtype=np.float32))
    watcher = Collecting()
    for _ in range(times):
        backward(model(x).sum(), watcher=watcher)
    found = {}
    for unit in units:
        found.update({p.name: to_host(part).copy() for p, part in unit.split(unit.take_local())})
    return found, watcher.in_place


def plain(model: nn.Module, times: int = 1) -> dict[str, Array]:
    """The same gradients without units."""
    x = xp.asarray(np.random.default_rng(1).standard_normal((3, 4), dtype=np.float32))
    for _ in range(times):
        model(x).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("make", [lambda: nn.MLP([4, 5, 3]), Twice])
def test_gradients_written_in_place_have_the_bits_of_others(make: type[nn.Module], times: int) -> None:
    found, in_place = gradients(make(), times)
    expected = plain(make(), times)
    assert found.keys() == expected.keys() == in_place.keys()
    for name, gradient in expected.items():
        assert gradient.any() and (found[name].view(np.uint32) == to_host(gradient).view(np.uint32)).all(), name
    once = make is not Twice and times == 1  # later shares are added to the first
    assert in_place == {name: once and name.endswith("weight") for name in in_place}


def test_a_place_is_given_once_and_only_for_what_is_not_rounded() -> None:
    model = nn.Linear(4, 2)
    model.name_parameters()
    (unit,) = units_of(model, 0, 1)
    weight, bias = unit.parameters
    assert unit.room(weight) is None and unit.local is None, "no engine's backward runs: nothing is wanted"
    unit.collecting = True
    place = unit.room(weight)
    assert place is not None and place.shape == (2, 4) and unit.room(weight) is None, "a second share would overwrite"
    unit.collect(bias, xp.ones(2, "float32"))
    assert unit.room(bias) is None, "what is there would be overwritten"
    place[...] = 3
    unit.collect(weight, place)
    assert unit.take_local().tolist() == [3] * 8 + [1] * 2
    assert unit.room(weight) is not None, "a new gradient, a new place"

    model = nn.Linear(4, 2, dtype="bfloat16")
    model.name_parameters()
    (unit,) = units_of(model, 0, 1)
    unit.collecting = True
    assert unit.room(unit.parameters[0]) is None and unit.local is None


def test_a_place_is_given_anew_after_gradients_are_dropped() -> None:
    model = nn.Linear(4, 2)
    model.name_parameters()
    (unit,) = units_of(model, 0, 1)
    unit.collecting = True
    assert unit.room(unit.parameters[0]) is not None
    unit.drop_gradients()
    assert unit.local is None and unit.room(unit.parameters[0]) is not None


def test_a_plain_backward_on_a_wrapped_model_leaves_the_engine_alone() -> None:
    engine = mz.DataParallel(nn.MLP([4, 5, 3]), mz.SGD(0.1))
    x, y = np.ones((2, 4), np.float32), np.zeros(2, int)
    F.cross_entropy(engine.model(x), y).backward()
    assert engine.memory()["gradients"] == 0 and all(p.grad is not None for p in engine.model.parameters())
    engine.backward(F.cross_entropy(engine(x), y))
    F.cross_entropy(engine.model(x), y).backward()
    engine.step()
    assert engine.steps == 1 and engine.memory()["gradients"] == 0
