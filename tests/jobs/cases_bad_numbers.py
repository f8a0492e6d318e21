"""Cases about norms, and about inf and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases_harness import Facts, unlike, whole

import minizero as mz
from minizero import nn
from minizero.backend import to_host
from minizero.operation import tensor

Comm = mz.Communicator
SIZES = (5, 3, 2)
Disturb = Callable[[mz.Engine], None]


class Slope(nn.Module):
    """Σ w·c: the gradient of w is c."""

    def __init__(self, size: int, dtype: Any) -> None:
        self.weight = nn.Parameter((size,), nn.normal(1.0), dtype)

    def forward(self, c: Any) -> mz.Tensor:
        return (self.weight * c).sum()


class Slopes(nn.Module):
    """Three of them, `parts.0` to `parts.2`."""

    def __init__(self, dtype: Any = "float32") -> None:
        self.parts = [Slope(size, dtype) for size in SIZES]

    def forward(self, *cs: Any) -> mz.Tensor:
        total = tensor(np.zeros((), cs[0].dtype))
        for part, c in zip(self.parts, cs, strict=True):
            total = total + part(c)
        return total


def slopes(step: int, rank: int, dtype: Any = "float32") -> list[Any]:
    generator = np.random.default_rng([step, rank])
    return [generator.standard_normal(size).astype(dtype) for size in SIZES]


def spoiled(rank: int, where: tuple[int, int], value: float, dtype: Any = "float32") -> list[Any]:
    """This rank's gradients, of which one element is something else."""
    cs = slopes(9, rank, dtype)
    cs[where[0]][where[1]] = value
    return cs


def optimizer(stage: type[mz.Engine]) -> mz.Optimizer:
    """Both kinds of moments, in turn."""
    return mz.Adam(0.1) if stage in mz.STAGES[::2] else mz.SGD(0.1, momentum=0.9)


def refused(comm: Comm, disturb: Disturb, dtype: Any = "float32") -> Facts:
    """Two steps; a bad one, that must raise and change nothing; zero_grad; a step as if it had never been."""
    compute = "float32" if dtype == "bfloat16" else dtype
    facts: Facts = {"errors": [], "unlike": [], "steps": []}

    def step(engine: mz.Engine, number: int) -> None:
        engine.backward(engine(*slopes(number, comm.rank, compute)))
        engine.step()

    undisturbed = []  # of DP with either optimizer; all stages have the same bits
    for stage in mz.STAGES[:2]:
        engine: mz.Engine = mz.DataParallel(Slopes(dtype), optimizer(stage), comm)
        for number in range(3):
            step(engine, number)
        undisturbed.append(whole(engine))
    for stage, wanted in zip(mz.STAGES, 2 * undisturbed, strict=True):
        engine = stage(Slopes(dtype), optimizer(stage), comm)
        for number in range(2):
            step(engine, number)
        before = whole(engine)
        with np.errstate(all="ignore"):
            disturb(engine)
            for _ in range(2):  # what is refused once is refused again
                try:
                    engine.step()
                except FloatingPointError as error:
                    facts["errors"].append(str(error))
        facts["steps"].append(engine.steps)
        facts["unlike"] += unlike(whole(engine), before, f"{stage.__name__}, after the error")
        engine.zero_grad()
        step(engine, 2)
        facts["unlike"] += unlike(whole(engine), wanted, f"{stage.__name__}, a step later")
    facts["raised"] = len(facts["errors"])
    return {**facts, "errors": sorted(set(facts["errors"]))}


def a_bad_number_on_one_rank_is_the_same_error_on_all_and_changes_nothing(comm: Comm) -> Facts:
    def bad(who: int, value: float) -> Disturb:
        def disturb(engine: mz.Engine) -> None:
            good, spoilt = slopes(9, comm.rank), spoiled(comm.rank, (1, 2), value)
            engine.backward(engine(*(spoilt if comm.rank == who else good)))

        return disturb

    ways = ((0, np.inf), (comm.size - 1, -np.inf), (1, np.nan))
    return {f"{value} on rank {who}": refused(comm, bad(who, value)) for who, value in ways}


def an_infinite_norm_never_becomes_a_weight(comm: Comm) -> Facts:
    facts: Facts = {"norms": [], "touched by clipping": []}

    def bad(value: float) -> Disturb:
        def disturb(engine: mz.Engine) -> None:
            good, spoilt = slopes(9, comm.rank), spoiled(comm.rank, (2, 0), value)
            engine.backward(engine(*(spoilt if comm.rank == 1 else good)))
            before = [to_host(unit.gradient).copy() for unit in engine.units]
            engine.clip_grad_norm(1e30)  # takes the mean
            first = [to_host(unit.gradient).copy() for unit in engine.units]
            facts["norms"].append(engine.clip_grad_norm(0.1))
            for x, y, unit in zip(before, first, engine.units, strict=True):
                same = np.array_equal(x / np.float32(comm.size), y, equal_nan=True)
                same &= np.array_equal(y, to_host(unit.gradient), equal_nan=True)
                facts["touched by clipping"] += [] if same else [type(engine).__name__]

        return disturb

    for value in (np.inf, -np.inf, np.nan):
        facts[str(value)] = refused(comm, bad(value))
    facts["norms"] = sorted({str(norm) for norm in facts["norms"]})
    return facts


def squares_that_overflow_are_refused_by_clipping_on_every_rank(comm: Comm) -> Facts:
    facts: Facts = {"errors": set(), "unlike": [], "finite": True}
    for stage in mz.STAGES:
        engine = stage(Slopes("float64"), mz.SGD(1e-190), comm)
        before = whole(engine)
        engine.backward(engine(*[c * 1e200 for c in slopes(0, comm.rank, "float64")]))
        try:
            engine.clip_grad_norm(1.0)
        except FloatingPointError as error:
            facts["errors"].add(str(error))
        facts["unlike"] += unlike(whole(engine), before, stage.__name__)
        engine.step()  # every gradient is finite, and so is every weight
        found = whole(engine)
        facts["finite"] &= all(np.isfinite(x).all() and (x != before[name]).all() for name, x in found.items())
    return {**facts, "errors": sorted(facts["errors"])}


# Their relatives.


def bad_numbers_that_no_single_gradient_shows_are_refused_as_well(comm: Comm) -> Facts:
    """Sums that overflow, opposite infinities, what bfloat16 makes inf, one micro-batch of two, no examples at all."""

    def all_large(engine: mz.Engine) -> None:
        engine.backward(engine(*spoiled(comm.rank, (0, 4), 3e38)))

    def opposite(engine: mz.Engine) -> None:
        value = {0: np.inf, 1: -np.inf}.get(comm.rank, 0.0)
        engine.backward(engine(*spoiled(comm.rank, (0, 4), value)))

    def rounded_up(engine: mz.Engine) -> None:
        """3.4e38 is a float32, and more than the largest bfloat16, 3.39e38."""
        engine.backward(engine(*spoiled(comm.rank, (0, 4), 3.4e38 if comm.rank == 0 else 0.0)))

    def first_of_two(engine: mz.Engine) -> None:
        engine.backward(engine(*spoiled(comm.rank, (0, 4), np.nan if comm.rank == 0 else 0.0)))
        engine.backward(engine(*slopes(8, comm.rank)))

    def locally(engine: mz.Engine) -> None:
        with engine.no_sync():
            engine.backward(engine(*spoiled(comm.rank, (0, 4), np.inf if comm.rank == 0 else 0.0)))
        engine.backward(engine(*slopes(8, comm.rank)))

    def without_examples(engine: mz.Engine) -> None:
        bad = comm.rank == 0
        engine.backward(engine(*spoiled(comm.rank, (0, 4), np.inf if bad else 0.0)), examples=0 if bad else 4)

    ways = (all_large, opposite, first_of_two, locally, without_examples)
    facts: Facts = {way.__name__: refused(comm, way) for way in ways}
    return {**facts, "rounded_up": refused(comm, rounded_up, "bfloat16")}


def a_norm_may_be_taken_without_clipping(comm: Comm) -> Facts:
    """max_norm = inf measures; of the trained parameters, each once, and nothing of the frozen."""
    facts: Facts = {"norms": [], "unlike": []}
    for stage in mz.STAGES:
        model = Slopes()
        model.parts[1].weight.requires_grad = False
        model.parts.append(model.parts[2])  # used twice: its gradient is 2c
        engine, unclipped = stage(model, mz.SGD(0.1), comm), stage(Slopes(), mz.SGD(0.1), comm)
        ones = [np.full(size, comm.rank + 1, np.float32) for size in SIZES]
        engine.backward(engine(*ones, ones[2]))
        facts["norms"].append(engine.clip_grad_norm(np.inf))
        engine.step()
        unclipped.backward(unclipped(*ones[:2], 2 * ones[2]))
        unclipped.step()
        found, wanted = whole(engine), whole(unclipped)
        for i in (0, 2):
            facts["unlike"] += unlike({"": found[f"parts.{i}.weight"]}, {"": wanted[f"parts.{i}.weight"]}, str(i))
    return facts


def gradients_of_any_size_leave_finite_weights(comm: Comm) -> Facts:
    """None at all, the smallest number, the largest whose sum is finite; and a step of ordinary ones afterwards."""
    facts: Facts = {}
    for size in (0.0, 1e-45, 1e25, 1e38):
        for name, make in (("Adam", lambda: mz.Adam(0.01)), ("SGD", lambda: mz.SGD(1e-6, momentum=0.5))):
            ends = []
            for stage in (mz.DataParallel, mz.Zero3):
                engine = stage(Slopes(), make(), comm)
                with np.errstate(all="ignore"):
                    engine.backward(engine(*[np.full(n, size, np.float32) for n in SIZES]))
                    norm = engine.clip_grad_norm(np.inf)
                    engine.step()
                    engine.backward(engine(*slopes(0, comm.rank)))
                    engine.step()
                ends.append(whole(engine))
            weights = [x for key, x in ends[0].items() if ":" not in key]
            facts[f"{name}, {size:g}"] = {
                "unlike": [word for end in ends for word in unlike(end, ends[0])],
                "finite": all(bool(np.isfinite(x).all()) for x in weights),
                "norm": norm,
            }
    return facts
