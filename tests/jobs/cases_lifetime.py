"""Cases about what lives too long: gradients, gathered weights, memory that is used again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from cases_harness import Facts, against_truth, drawn_from, flat, true_steps, unlike, whole
from lifetime_poison import poisoned, poisonous

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import to_host, xp
from minizero.flat import Unit
from models import IN, OUT, PROBLEMS, Batch, Chain, Leaf, Oddments, Problem

Comm = mz.Communicator
MLP: Problem = PROBLEMS["mlp"]


def a_layer_used_twice_is_trained_right(comm: Comm) -> Facts:
    problem = PROBLEMS["twice"]
    return against_truth(
        comm, lambda rank: problem.build(), lambda: mz.SGD(0.5, momentum=0.9), problem.loss, drawn_from(problem)
    )


def the_norm_does_not_grow_with_ranks_or_micro_batches(comm: Comm) -> Facts:
    """The same 12 examples a step, in N x k slices; the norms of two steps."""
    norms = {}
    for micros in (1, 3) if comm.size == 2 else (1, 2):
        for stage in mz.STAGES:
            engine = stage(MLP.build(), mz.SGD(0.5), comm)
            found = norms[f"{stage.__name__}, k = {micros}"] = list[float]()
            for step in range(2):
                x, y = pool(step)
                slices = xp.array_split(xp.arange(12), comm.size * micros)[comm.rank :: comm.size]
                for part in slices:
                    engine.backward(F.cross_entropy(engine(x[part]), y[part]))
                found.append(engine.clip_grad_norm(1e6))
                engine.step()
    return norms


def pool(step: int) -> tuple[Any, Any]:
    batch = MLP.draw(np.random.default_rng(step), 12)
    return batch.inputs[0], batch.targets


class Odd(nn.Module):
    """Odd sizes, empty parameters, padding, a layer that nobody uses and a frozen one."""

    def __init__(self) -> None:
        self.first, self.odd = nn.Linear(IN, 7), Oddments(7, "none flat scalar one weight", "float32")
        self.leaf, self.unused, self.frozen, self.last = Leaf(), nn.Linear(3, 3), nn.Linear(7, 7), nn.Linear(7, OUT)
        self.frozen.weight.requires_grad = False

    def forward(self, x: Any) -> mz.Tensor:
        return self.last(F.tanh(self.frozen(self.leaf(self.odd(F.tanh(self.first(x)))))))


def memory_that_nobody_has_written_is_never_read(comm: Comm) -> Facts:
    """`empty` returns NaN, and scratch, gathered units and dropped gradients become NaN between two uses."""

    def train(stage: type[mz.Engine], optimizer: mz.Optimizer) -> dict[str, Any]:
        engine = stage(Odd(), optimizer, comm)
        for step in range(3):
            for micro in range(2):
                engine.backward(MLP.loss(engine, drawn_from(MLP)(step, comm.rank, micro)))
            engine.clip_grad_norm(0.1)
            engine.step()
        return whole(engine)

    facts: Facts = {"compared": 0, "unlike": [], "NaN": []}
    for stage in mz.STAGES:
        for make in (lambda: mz.Adam(0.05, weight_decay=0.1), lambda: mz.SGD(0.5)):
            clean = train(stage, make())
            poisoned.clear()
            with poisonous():
                found = train(stage, make())
            facts["compared"] += len(found)
            facts["unlike"] += unlike(found, clean, stage.__name__)
            facts["NaN"] += [name for name, x in found.items() if not np.isfinite(x).all()]
            facts[stage.__name__] = sorted(poisoned)
    return facts


class Boom(Exception):  # noqa: N818
    pass


class Fuse(nn.Linear):
    """A layer that raises once its result is there, where `blown` says so: its unit is whole then."""

    blown = False

    def forward(self, x: Any) -> mz.Tensor:
        y = super().forward(x)
        if self.blown:
            raise Boom
        return y


def fused(rank: int) -> nn.Module:
    return Chain(Fuse(IN, 7), Fuse(7, 9), Fuse(9, OUT))


def an_exception_in_a_forward_leaves_nothing_gathered_and_no_trace(comm: Comm) -> Facts:
    draw = drawn_from(MLP)
    wanted = true_steps(fused, lambda: mz.Adam(0.05), MLP.loss, draw, comm.size, steps=3)
    facts: Facts = {"caught": 0, "unlike": []}
    for stage in mz.STAGES:
        alive: list[weakref.ref[Any]] = []  # every vector that a unit's parameters became views of
        bind = Unit.bind

        def bind_and_note(unit: Unit, vector: Any, alive: Any = alive, bind: Any = bind) -> None:
            alive.append(weakref.ref(vector))
            bind(unit, vector)

        with mock.patch.object(Unit, "bind", bind_and_note):
            engine: Any = stage(fused(0), mz.Adam(0.05), comm)
            engine.backward(MLP.loss(engine, draw(0, comm.rank, 0)))
            engine.step()
            held = engine.memory()
            for name in "abc":
                layer = getattr(engine.model, name)
                layer.blown = True
                try:
                    MLP.loss(engine, draw(9, comm.rank, 0))
                except Boom:
                    facts["caught"] += 1
                layer.blown = False
                facts[f"{stage.__name__}, {name}"] = {
                    "whole": sum(unit.whole for unit in engine.units),
                    "alive": sum(ref() is not None for ref in alive),
                    "more held": engine.memory() != held,
                }
            for step in (1, 2):
                engine.backward(MLP.loss(engine, draw(step, comm.rank, 0)))
                engine.step()
                facts["unlike"] += unlike(whole(engine), wanted[step + 1][0], f"{stage.__name__}, step {step + 1}")
    return facts


def what_zero_grad_forgets_has_never_been(comm: Comm) -> Facts:
    """With dropout, moments and two micro-batches a step: each of them could remember."""
    problem = PROBLEMS["dropout"]
    draw = drawn_from(problem)
    wanted = true_steps(
        lambda rank: problem.build(), lambda: mz.Adam(0.05), problem.loss, draw, comm.size, steps=4, micros=2
    )
    facts: Facts = {"forgotten": 0, "unlike": [], "more held": []}

    def backward(engine: mz.Engine) -> None:
        engine.backward(problem.loss(engine, draw(9, comm.rank, 0)))

    def locally(engine: mz.Engine) -> None:
        with engine.no_sync():
            backward(engine)

    def clipped(engine: mz.Engine) -> None:
        backward(engine)
        engine.clip_grad_norm(0.01)

    def forward_only(engine: mz.Engine) -> None:
        problem.loss(engine, draw(9, comm.rank, 0))

    ways: list[Callable[[mz.Engine], None]] = [backward, locally, clipped, forward_only]
    for stage in mz.STAGES:
        engine = stage(problem.build(), mz.Adam(0.05), comm)
        for step in range(4):
            held = engine.memory()
            ways[step](engine)
            engine.zero_grad()
            facts["more held"] += [stage.__name__] if engine.memory() != held else []
            facts["forgotten"] += 1
            for micro in range(2):
                engine.backward(problem.loss(engine, draw(step, comm.rank, micro)))
            engine.step()
            where = f"{stage.__name__}, after {ways[step].__name__}"
            facts["unlike"] += unlike(whole(engine), wanted[step + 1][0], where)
    return facts


# Their relatives.


class Again(nn.Module):
    """A layer that calls itself."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((7, 7), nn.normal(0.4))

    def forward(self, x: Any, depth: int = 2) -> mz.Tensor:
        y = F.tanh(F.linear(x, self.weight))
        return F.add(self(y, depth - 1), F.linear(x, self.weight)) if depth else y


def a_layer_that_calls_itself_is_whole_until_the_outermost_call_ends(comm: Comm) -> Facts:
    """Its weight is used again after the inner call has returned."""
    return against_truth(
        comm, lambda rank: Chain(nn.Linear(IN, 7), Again(), nn.Linear(7, OUT)), lambda: mz.SGD(0.5, momentum=0.9),
        MLP.loss, drawn_from(MLP),
    )  # fmt: skip


def graphs_that_wait_are_run_backward_in_any_order(comm: Comm) -> Facts:
    """Three forwards, then backward through the last, the first and the second: added in that order."""
    draw, order = drawn_from(MLP), (2, 0, 1)

    def in_that_order(step: int, rank: int, micro: int) -> Batch:
        return draw(step, rank, order[micro])

    wanted = true_steps(
        lambda rank: MLP.build(), lambda: mz.SGD(0.5, 0.9), MLP.loss, in_that_order, comm.size, steps=2, micros=3
    )
    facts: Facts = {"compared": 0, "unlike": [], "whole": {}}
    for stage in mz.STAGES:
        engine = stage(MLP.build(), mz.SGD(0.5, 0.9), comm)
        for step in range(2):
            losses = [MLP.loss(engine, draw(step, comm.rank, micro)) for micro in range(3)]
            facts["whole"][stage.__name__] = sum(unit.whole for unit in engine.units)
            for micro in order:
                engine.backward(losses[micro])
            engine.step()
            facts["unlike"] += unlike(whole(engine), wanted[step + 1][0], f"{stage.__name__}, step {step + 1}")
            facts["compared"] += len(wanted[step + 1][0])
    return facts


def a_failed_forward_with_dropout_leaves_no_trace_after_zero_grad(comm: Comm) -> Facts:
    """The loss refuses its targets when dropout has drawn already."""
    problem = PROBLEMS["dropout"]
    draw = drawn_from(problem)
    wanted = true_steps(lambda rank: problem.build(), lambda: mz.SGD(0.5), problem.loss, draw, comm.size, steps=2)
    facts: Facts = {"caught": 0, "unlike": []}
    for stage in mz.STAGES:
        engine = stage(problem.build(), mz.SGD(0.5), comm)
        for step in range(2):
            batch = draw(step, comm.rank, 0)
            try:
                problem.loss(engine, batch._replace(targets=to_host(batch.targets) + OUT))
            except IndexError:
                facts["caught"] += 1
            engine.zero_grad()
            engine.backward(problem.loss(engine, batch))
            engine.step()
        found = flat(engine.gather_parameters(), {})
        facts["unlike"] += unlike(found, wanted[-1][0], stage.__name__)
    return facts


def a_loss_from_before_the_last_step_is_refused_and_leaves_no_trace(comm: Comm) -> Facts:
    """Its backward would mix old activations with new weights. It does on all ranks alike, and on all is refused."""
    draw = drawn_from(MLP)
    wanted = true_steps(lambda rank: MLP.build(), lambda: mz.SGD(0.5, 0.9), MLP.loss, draw, comm.size, steps=2)
    facts: Facts = {"refused": [], "whole": [], "unlike": []}
    for stage in mz.STAGES:
        engine = stage(MLP.build(), mz.SGD(0.5, 0.9), comm)
        for step in range(2):
            stale = MLP.loss(engine, draw(9, comm.rank, 0))
            engine.backward(MLP.loss(engine, draw(step, comm.rank, 0)))
            engine.step()
            try:
                engine.backward(stale)
            except RuntimeError as error:
                facts["refused"].append(str(error))
            facts["whole"].append(sum(unit.whole for unit in engine.units))
        facts["unlike"] += unlike(whole(engine), wanted[-1][0], stage.__name__)
    return facts


def a_forward_that_failed_has_drawn_nothing(comm: Comm) -> Facts:
    """Dropout had drawn when the next layer raised; without zero_grad."""

    def make(rank: int) -> nn.Module:
        return nn.Sequential(nn.Linear(IN, 9), nn.Dropout(0.3), Fuse(9, OUT))

    draw = drawn_from(MLP)
    wanted = true_steps(make, lambda: mz.SGD(0.5), MLP.loss, draw, comm.size, steps=2)
    facts: Facts = {"caught": 0, "unlike": []}
    for stage in mz.STAGES:
        engine: Any = stage(make(0), mz.SGD(0.5), comm)
        for step in range(2):
            engine.model.layers[2].blown = True
            try:
                MLP.loss(engine, draw(9, comm.rank, 0))
            except Boom:
                facts["caught"] += 1
            engine.model.layers[2].blown = False
            engine.backward(MLP.loss(engine, draw(step, comm.rank, 0)))
            engine.step()
        facts["unlike"] += unlike(engine.gather_parameters(), wanted[-1][0], stage.__name__)
    return facts
