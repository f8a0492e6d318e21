"""Cases about who is who: ranks that skip a layer, aliases, seeds, frozen layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cases_harness import Facts, Flat, against_truth, drawn_from, still, true_steps, unlike, whole

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import to_host, xp
from models import IN, OUT, PROBLEMS, Batch, Chain, Problem, frozen

Comm = mz.Communicator
MLP: Problem = PROBLEMS["mlp"]


class Stack(nn.Module):
    """6 -> 7, then square layers, then 7 -> 5. A rank may visit the square ones in a way of its own."""

    def __init__(self, others: int = 3) -> None:
        self.first, self.last = nn.Linear(IN, 7), nn.Linear(7, OUT)
        self.layers = [nn.Linear(7, 7, bias=i > 0) for i in range(others)]

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), *((f"layers.{i}", layer) for i, layer in enumerate(self.layers)),
                ("last", self.last)]  # fmt: skip

    def forward(self, x: Any, visits: tuple[int, ...] = (0, 1, 2), detach: int = -1) -> mz.Tensor:
        x = F.tanh(self.first(x))
        for i in visits:
            x = F.tanh(self.layers[i](x))
            if i == detach:
                x = x.detach()
        return self.last(x)


def odd_rank_0(visits: tuple[int, ...], detach: int = -1) -> Callable[[int, int, int], Batch]:
    def draw(step: int, rank: int, micro: int) -> Batch:
        batch = drawn_from(MLP)(step, rank, micro)
        return batch._replace(inputs=(*batch.inputs, visits, detach)) if rank == 0 else batch

    return draw


def beside_the_truth(comm: Comm, *ways: tuple[tuple[int, ...], int]) -> Facts:
    """The first three stages have no collectives in forward: whatever a rank leaves out is zeros."""
    facts: Facts = {"compared": 0, "unlike": [], "still": []}
    for visits, detach in ways:
        found = against_truth(
            comm, lambda rank: Stack(), lambda: mz.SGD(0.5, momentum=0.9), MLP.loss, odd_rank_0(visits, detach),
            stages=mz.STAGES[:3],
        )  # fmt: skip
        for key, value in found.items():
            facts[key] += value
    return facts


def under_zero3(comm: Comm, *ways: tuple[tuple[int, ...], int]) -> list[Facts]:
    """What happens in two steps, and whether the weights have changed."""
    found = []
    for visits, detach in ways:
        part = comm.split(0)  # the error breaks it
        engine = mz.Zero3(Stack(), mz.SGD(0.5), part)
        start = [to_host(unit.weights).copy() for unit in engine.units]
        began, error = time.monotonic(), ""
        try:
            for step in range(2):
                engine.backward(MLP.loss(engine, odd_rank_0(visits, detach)(step, comm.rank, 0)))
                engine.step()
        except mz.CollectiveError as caught:
            error = str(caught)
        changed = any((x != to_host(unit.weights)).any() for x, unit in zip(start, engine.units, strict=True))
        found.append({"error": error, "changed": changed, "fast": time.monotonic() - began < 8})
    return found


SKIPS = (((1, 2), -1), ((0, 2), -1), ((0, 1), -1), ((), -1))  # the next one has another size; the same; the last; all


def a_layer_that_rank_0_skips_has_zeros_from_it(comm: Comm) -> Facts:
    return beside_the_truth(comm, *SKIPS)


def a_layer_that_rank_0_skips_under_zero3_is_an_error_on_every_rank(comm: Comm) -> Facts:
    return {"ways": under_zero3(comm, *SKIPS)}


def what_was_taken_from_the_model_before_wrapping_is_what_is_trained(comm: Comm) -> Facts:
    """Parameters, layers, a transposed view, an optimizer; and arrays, which are of no use to anyone any more."""
    draw = drawn_from(MLP)
    wanted = true_steps(lambda rank: MLP.build(), lambda: mz.Adam(0.05), MLP.loss, draw, comm.size, steps=2)
    facts: Facts = {"unlike": [], "compared": 0}
    for stage in mz.STAGES:
        model: Any = MLP.build()
        optimizer = mz.Adam(0.05)
        model.materialise()
        parameters, first = model.parameters(), model.layers[0]
        with mz.no_grad():
            view = model.layers[1].weight.T
        arrays = [parameter.data for parameter in parameters]
        engine = stage(model, optimizer, comm)
        for array in arrays:
            array[...] = np.nan
        for step in range(2):
            engine.backward(MLP.loss(engine, draw(step, comm.rank, 0)))
            engine.step()
        names = [name for name, _ in model.named_parameters()]
        if stage is mz.Zero3:
            facts["not here"] = []
            for taken in (parameters[0], view):
                try:
                    taken.data  # noqa: B018
                except RuntimeError as error:
                    facts["not here"].append(str(error))
            with engine._whole(engine.units):
                found = {name: to_host(p.data).copy() for name, p in zip(names, parameters, strict=True)}
                facts["view"] = bool((view.data == model.layers[1].weight.data.T).all())
        else:
            found = {name: to_host(p.data).copy() for name, p in zip(names, parameters, strict=True)}
            found_view = to_host(view.data).T
            facts["unlike"] += unlike({"": found_view.copy()}, {"": found["layers.1.weight"]}, "the view")
        facts["unlike"] += unlike(found, {name: wanted[-1][0][name] for name in names}, stage.__name__)
        facts["unlike"] += [] if first is model.layers[0] and model.parameters() == parameters else ["other objects"]
        facts["compared"] += len(found)
    return facts


def ranks_with_seeds_of_their_own_train_from_those_of_rank_0(comm: Comm) -> Facts:
    """Also where their models have drawn already, as after a first forward."""

    def drawn(rank: int) -> nn.Module:
        model = MLP.build(seed=10 + rank)
        model.materialise()
        return model

    def to_be_drawn(rank: int) -> nn.Module:
        return MLP.build(seed=10 + rank)

    facts: Facts = {"own": float(np.abs(to_host(drawn(comm.rank).parameters()[0].data)).sum())}
    for make in (drawn, to_be_drawn):
        facts[make.__name__] = against_truth(comm, make, lambda: mz.SGD(0.5), MLP.loss, drawn_from(MLP), steps=1)
    return facts


def a_frozen_layer_between_trained_ones_has_no_moments_no_gradients_and_no_decay(comm: Comm) -> Facts:
    problem = PROBLEMS["frozen"]
    draw = drawn_from(problem)

    def adam() -> mz.Optimizer:
        return mz.Adam(0.05, weight_decay=0.5)

    facts = against_truth(comm, lambda rank: problem.build(), adam, problem.loss, draw)
    for stage in mz.STAGES:
        engine = stage(problem.build(), adam(), comm)
        start = engine.gather_parameters()
        engine.backward(problem.loss(engine, draw(0, comm.rank, 0)))
        engine.step()
        engine.backward(problem.loss(engine, draw(1, comm.rank, 0)))
        fixed = [unit for unit in engine.units if not unit.trainable]
        facts[stage.__name__] = {
            "frozen": [unit.name for unit in fixed],
            "held": sum(unit.held()["gradients"] + unit.held()["optimizer"] for unit in fixed),
            "state of": sorted(engine.gather_optimizer_state()),
            "unchanged": still(start, engine.gather_parameters()),
        }
    return facts


# Their relatives.


OTHER_WAYS = (((0, 1, 2), 0), ((0, 1, 2), 2), ((0, 1, 1, 2), -1), ((0, 2, 1), -1))


def layers_that_rank_0_detaches_repeats_or_swaps_have_from_it_what_it_found(comm: Comm) -> Facts:
    return beside_the_truth(comm, *OTHER_WAYS)


def layers_that_rank_0_detaches_repeats_or_swaps_are_an_error_under_zero3(comm: Comm) -> Facts:
    """Where it detaches, the forward is the same everywhere, and backward shows the difference."""
    return {"ways": under_zero3(comm, *OTHER_WAYS)}


def values_that_only_rank_0_has_arrive_bit_for_bit(comm: Comm) -> Facts:
    """-0.0, the smallest number, a NaN of its own; from Fortran order and every second element."""
    special = np.array([-0.0, 1e-45, 3.4e38, -1.5], np.float32)
    special = np.append(special, np.array([0x7FC12345], np.uint32).view(np.float32))
    values = np.resize(special, (7, 2 * IN))[:, ::2]
    others = np.resize(special, (OUT, 7))
    wanted: Flat = {"layers.0.weight": np.ascontiguousarray(values), "layers.1.weight": others}
    facts: Facts = {"unlike": []}
    for stage in mz.STAGES:
        model: Any = nn.Sequential(nn.Linear(IN, 7), nn.Linear(7, OUT), seed=comm.rank)
        if comm.rank == 0:
            model.layers[0].weight.bind(xp.asarray(values))
            model.layers[1].weight.bind(xp.asarray(np.asfortranarray(others)))
        engine = stage(model, mz.SGD(0.1), comm)
        found = engine.gather_parameters()
        facts["unlike"] += unlike({name: found[name] for name in wanted}, wanted, stage.__name__)
    return facts


def everything_frozen_but_one_bias_trains_that_bias_alone(comm: Comm) -> Facts:
    """Of the middle layer: backward need not visit the first, and must go through the frozen last."""

    def make(rank: int) -> nn.Module:
        return Chain(frozen(nn.Linear(IN, 7)), frozen(nn.Linear(7, 7), "weight"), frozen(nn.Linear(7, OUT)))

    facts = against_truth(comm, make, lambda: mz.SGD(0.5, momentum=0.9), MLP.loss, drawn_from(MLP))
    engine = mz.Zero2(make(0), mz.SGD(0.5, momentum=0.9), comm)
    engine.backward(MLP.loss(engine, drawn_from(MLP)(0, comm.rank, 0)))
    engine.step()
    return {**facts, "state of": sorted(engine.gather_optimizer_state()), "names": sorted(whole(engine))}
