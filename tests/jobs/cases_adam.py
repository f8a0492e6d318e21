"""Cases about Adam: dtypes, steps without a gradient, weight decay, numbers from NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from cases_harness import Facts, drawn_from, unlike, whole

import minizero as mz
from minizero import nn
from models import PROBLEMS

Comm = mz.Communicator
Optimize = Callable[[], mz.Optimizer]
SLOPES = (0.5, -2.0, 3.0)  # the mean gradient over ranks, if there is one


class Slope(nn.Module):
    """Σ w·c: the gradient of w is c."""

    def __init__(self, dtype: Any) -> None:
        self.weight = nn.Parameter((len(SLOPES),), nn.normal(1.0), dtype)

    def forward(self, c: Any) -> mz.Tensor:
        return (self.weight * c).sum()


class Slopes(nn.Module):
    """`always` is used in every step, `sometimes` where `model(c, True)` says so, `never` never."""

    def __init__(self, dtype: Any) -> None:
        self.always, self.sometimes, self.never = Slope(dtype), Slope(dtype), Slope(dtype)

    def forward(self, c: Any, both: bool) -> mz.Tensor:
        return self.always(c) + self.sometimes(c) if both else self.always(c)


def paths(comm: Comm, make: Optimize, every: int, steps: int = 6) -> Facts:
    """Values of the weights at the start and after each step, by dtype and name, if all stages have the same."""
    facts: Facts = {"unlike": []}
    for dtype in ("float64", "float32"):
        c = np.array(SLOPES, dtype) * 2 * (comm.rank + 1) / (comm.size + 1)
        ways: list[dict[str, list[Any]]] = []
        for stage in mz.STAGES:
            engine = stage(Slopes(dtype), make(), comm)
            way = {name: [x] for name, x in engine.gather_parameters().items()}
            for step in range(steps):
                engine.backward(engine(c, step % every == 0))
                engine.step()
                for name, x in engine.gather_parameters().items():
                    way[name].append(x)
            ways.append(way)
            for name, values in way.items():
                facts["unlike"] += unlike({name: np.array(values)}, {name: np.array(ways[0][name])}, stage.__name__)
        facts[dtype] = {name: np.array(values).tolist() for name, values in ways[0].items()}
    return facts


def a_parameter_with_a_gradient_in_every_second_step_follows_the_formula(comm: Comm) -> Facts:
    return paths(comm, lambda: mz.Adam(0.1, betas=(0.8, 0.95)), every=2)


def weight_decay_is_decoupled_and_epsilon_outside_of_the_root(comm: Comm) -> Facts:
    return {
        "decay": paths(comm, lambda: mz.Adam(0.5, weight_decay=1.5), every=1),
        "epsilon": paths(comm, lambda: mz.Adam(0.5, betas=(0.5, 0.7), eps=0.3, weight_decay=0.5), every=1),
    }


def a_parameter_that_is_never_used_only_decays(comm: Comm) -> Facts:
    facts = paths(comm, lambda: mz.Adam(0.5, weight_decay=0.5), every=1, steps=4)
    engine = mz.Zero2(Slopes("float64"), mz.Adam(0.5, weight_decay=0.5), comm)
    for _ in range(2):
        engine.backward(engine(np.array(SLOPES), True))
        engine.step()
    return {**facts, "moments": {key: x.tolist() for key, x in engine.gather_optimizer_state()["never.weight"].items()}}


def every_dtype_stays_what_it_is_in_training_with_numbers_from_numpy(comm: Comm) -> Facts:
    """After each call: of what the rank holds, and of what it is handed."""
    problem, facts = PROBLEMS["mlp"], {}
    for dtype in ("float32", "float64", "bfloat16"):
        seen: dict[str, set[str]] = {"weights": set(), "gradients": set(), "optimizer": set(), "norm": set()}

        def look(engine: mz.Engine, seen: dict[str, set[str]] = seen) -> None:
            for unit in engine.units:
                seen["weights"] |= {str(unit.weights.dtype)}
                seen["gradients"] |= {str(g.dtype) for g in (unit.gradient, unit.local) if g is not None}
                seen["optimizer"] |= {str(x.dtype) for x in (unit.state or {}).values()}

        for i, stage in enumerate(mz.STAGES):
            optimizer = (
                mz.SGD(np.float64(0.5), np.float64(0.9)),
                mz.Adam(np.float64(0.05), (np.float64(0.9), np.float64(0.99)), np.float64(1e-6), np.float64(0.1)),
            )[i % 2]
            engine = stage(problem.build(0, dtype), optimizer, comm)
            for step in range(2):
                batch = drawn_from(problem, dtype=dtype)(step, comm.rank, 0)
                loss = problem.loss(engine, batch) * np.float64(0.5) + np.array(0.25)
                with engine.no_sync():
                    engine.backward(loss, examples=np.int64(4))  # type: ignore[arg-type]
                look(engine)
                engine.backward(np.float64(2) * problem.loss(engine, batch), examples=4)
                look(engine)
                seen["norm"] |= {type(engine.clip_grad_norm(np.float64(0.1))).__name__}
                look(engine)
                engine.step()
                look(engine)
        facts[dtype] = {what: sorted(names) for what, names in seen.items()}
    return facts


def numbers_from_numpy_have_the_bits_of_pythons(comm: Comm) -> Facts:
    """What a schedule makes with NumPy, and a largest norm. (Saved ones come back as Python's numbers.)"""
    problem = PROBLEMS["mlp"]
    facts: Facts = {"compared": 0, "unlike": []}

    def train(kind: str, dtype: str, number: Callable[[float], Any], max_norm: float) -> dict[str, Any]:
        optimizer = (
            mz.SGD(number(0.3), number(0.9)) if kind == "SGD"
            else mz.Adam(number(0.03), (number(0.9), number(0.99)), number(1e-6), number(0.1))
        )  # fmt: skip
        engine = mz.Zero2(problem.build(0, dtype), optimizer, comm)
        for step in range(2):
            optimizer.lr = number(0.3 * 0.7**step)
            engine.backward(problem.loss(engine, drawn_from(problem, dtype=dtype)(step, comm.rank, 0)))
            engine.clip_grad_norm(max_norm)
            engine.step()
        return whole(engine)

    types: tuple[Any, ...] = (np.float64, np.float32)
    for kind, dtype, numpys in itertools.product(("SGD", "Adam"), ("float32", "bfloat16"), types):
        found = train(kind, dtype, numpys, numpys(0.07))
        wanted = train(kind, dtype, lambda x, of=numpys: float(of(x)), float(numpys(0.07)))  # type: ignore[misc]
        facts["unlike"] += unlike(found, wanted, f"{kind}, {dtype}, {numpys.__name__}")
        facts["compared"] += len(found)
    return facts
