"""The engine's plumbing where training goes off the straight road, in every stage. Run on 3 ranks or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expect
import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn

comm = mz.Communicator()
generator = np.random.default_rng(comm.rank)
X, Y = generator.standard_normal((4, 6), np.float32), generator.integers(0, 3, 4)
Engines = type[mz.Engine]


def model(dtype: str = "float32", freeze: bool = False) -> nn.Module:
    made: Any = nn.MLP([6, 7, 5, 3], seed=2, dtype=dtype)
    if freeze:
        made.layers[1].weight.requires_grad = made.layers[1].bias.requires_grad = False
    return made


def inside(engine: mz.Engine) -> Any:
    return vars(engine.model)["layers"]


def loss(engine: mz.Engine) -> mz.Tensor:
    return F.cross_entropy(engine(X), Y)


def bits(engine: mz.Engine) -> bytes:
    return b"".join(values.tobytes() for values in engine.gather_parameters().values())


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    expect.raises(kind, call, *words)


def nested_no_sync_stays_local(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    with engine.no_sync():
        with engine.no_sync():
            pass
        first = loss(engine)
        comm.traffic.clear()
        engine.backward(first)
        assert comm.traffic["all_reduce"] + comm.traffic["reduce_scatter"] == 0, comm.traffic


def an_exception_inside_no_sync_ends_it(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    try:
        with engine.no_sync():
            raise KeyError
    except KeyError:
        pass
    engine.backward(loss(engine))
    engine.step()


def a_refused_first_step_leaves_no_state(stage: Engines) -> None:
    engine = stage(model(), mz.Adam(0.1), comm)
    engine.backward(loss(engine) * (float("nan") if comm.rank == 1 else 1.0))
    refused(engine.step, FloatingPointError, "layers.0.weight")
    assert engine.memory()["optimizer"] == 0 and engine.gather_optimizer_state() == {} and engine.steps == 0


def running_out_of_memory_in_the_step_tears_nothing(stage: Engines) -> None:
    class Poor(mz.Adam):
        left = 1

        def init(self, weights: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise MemoryError
            return super().init(weights)

    optimizer = Poor(0.1)
    engine, same = stage(model(), optimizer, comm), stage(model(), mz.Adam(0.1), comm)
    engine.backward(loss(engine))
    same.backward(loss(same))
    before, held = bits(engine), engine.memory()["gradients"]
    refused(engine.step, MemoryError)
    assert bits(engine) == before and engine.steps == 0 and engine.memory()["gradients"] == held
    optimizer.left = 9
    engine.step()
    same.step()
    assert bits(engine) == bits(same) != before


def requires_grad_may_not_change_after_wrapping_neither_way(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    inside(engine)[2].bias.requires_grad = False
    refused(lambda: engine.backward(loss(engine)), RuntimeError, "layers.2.bias")
    frozen = stage(model(freeze=True), mz.SGD(0.1), comm)
    inside(frozen)[1].weight.requires_grad = True
    refused(lambda: frozen.backward(loss(frozen)), RuntimeError, "layers.1.weight")


def an_evaluation_does_not_fill_an_empty_batch(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    engine.backward(F.cross_entropy(engine(X[:0]), Y[:0]))
    with mz.no_grad():
        engine(X)
    refused(engine.step, ValueError, "no rank had a single example")


def what_step_refuses_once_it_refuses_again(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    before = bits(engine)
    examples: Any = np.int64(4) if comm.rank else None
    engine.backward(loss(engine), examples=examples)
    for _ in range(2):
        refused(engine.step, ValueError, "examples=", "ranks [0]")
    assert bits(engine) == before


def ranks_that_call_backward_unequally_often_are_refused(stage: Engines) -> None:
    engine = stage(model(), mz.SGD(0.1), comm)
    engine.backward(loss(engine))
    if comm.rank == 0:
        engine.zero_grad()
    engine.backward(loss(engine))
    refused(engine.step, RuntimeError, f"{[1] + [2] * (comm.size - 1)} times")


def dropout_draws_from_the_groups_rank(stage: Engines) -> None:
    half = comm.split(comm.rank // 2)  # rank 2 and up are 0, 1 of their own group
    layers = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3), seed=1)
    engine = stage(layers, mz.SGD(0.1), half)
    x = np.ones((4, 6), np.float32)
    engine.backward(F.cross_entropy(engine(x), np.zeros(4, np.int64)))
    engine.step()
    mine = np.array([engine.noise.generator().random()])
    assert engine.noise.rank == half.rank and 0 < mine[0] < 1
    everyone = comm.mpi.allgather((half.rank, float(mine[0])))
    assert len({value for _, value in everyone}) == len({rank for rank, _ in everyone}), everyone


def frozen_parameters_must_have_the_same_shape_everywhere(stage: Engines) -> None:
    frozen = nn.Linear(4, 6) if comm.rank == 1 else nn.Linear(6, 4)
    frozen.weight.requires_grad = False
    frozen.bias = None
    part = nn.Sequential(nn.Linear(3, 3), frozen)
    refused(lambda: stage(part, mz.SGD(0.1), comm), ValueError, "ranks [1]", "another model")


def optimizers_must_have_the_same_settings_everywhere(stage: Engines) -> None:
    refused(lambda: stage(model(), mz.SGD(0.1 * (1 + comm.rank)), comm), ValueError, "another model", "optimizer")


def parameters_come_in_the_models_order(stage: Engines) -> None:
    layers: Any = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    layers[2].weight = layers[1].weight  # shared: in the root unit, which is unit 0, but not the model's first
    engine = stage(nn.Sequential(*layers), mz.SGD(0.1), comm)
    names = [name for name, _ in engine.model.named_parameters()]
    assert names != [p.name for unit in engine.units for p in unit.parameters]
    assert list(engine.gather_parameters()) == names and len(names) == 7


def a_norm_that_overflows_is_refused(stage: Engines) -> None:
    engine = stage(model("float64"), mz.SGD(1e-200), comm)
    before = bits(engine)
    engine.backward(F.cross_entropy(engine(X.astype(np.float64)), Y) * 1e200)
    refused(lambda: engine.clip_grad_norm(1.0), FloatingPointError, "overflow")
    assert bits(engine) == before


def modules_in_lists_of_lists_are_trained(stage: Engines) -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            self.grid = [[nn.Linear(6, 6), nn.Linear(6, 6)], [{"last": nn.Linear(6, 3)}]]

        def forward(self, x: Any) -> mz.Tensor:
            grid: Any = self.grid
            return grid[1][0]["last"](grid[0][1](grid[0][0](x)))

    engine = stage(Grid(), mz.SGD(0.1), comm)
    before = engine.gather_parameters()
    assert [unit.name for unit in engine.units] == ["grid.0.0", "grid.0.1", "grid.1.0.last"]
    assert (before["grid.0.0.weight"] != before["grid.0.1.weight"]).any()
    engine.backward(loss(engine))
    engine.step()
    assert all((values != before[name]).any() for name, values in engine.gather_parameters().items())


def a_module_that_the_engine_does_not_know_is_refused(stage: Engines) -> None:
    engine = stage(nn.Sequential(nn.Linear(6, 3)), mz.SGD(0.1), comm)
    inside(engine).append(nn.Linear(3, 3))
    refused(lambda: engine.backward(loss(engine)), RuntimeError, "not part of the wrapped model")


CLAIMS = [claim for name, claim in list(globals().items()) if getattr(claim, "__module__", "") == __name__ and
          name not in ("model", "loss", "bits", "refused", "inside")]  # fmt: skip
if __name__ == "__main__":
    for claim in CLAIMS:
        for stage in mz.STAGES:
            try:
                claim(stage)
            except Exception as error:
                raise AssertionError(f"{claim.__name__}, {stage.__name__}: {error!r}") from error
    if comm.rank == 0:
        print(f"{len(CLAIMS)} claims")
