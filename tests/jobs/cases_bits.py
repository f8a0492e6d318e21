"""Cases about bits: the same numbers by other roads."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases_harness import Facts, Flat, against_truth, drawn_from, true_steps, unlike, whole

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.operation import tensor
from models import IN, OUT, PROBLEMS, Batch, Problem

Comm = mz.Communicator
CLIP = 0.1  # below every norm
SIZES = ([1, 1, 1], [13], [5, 3, 2], [7, 64, 1], [4, 8, 12], [97, 1, 50, 2])  # elements of each layer


class Part(nn.Module):
    """Σ w·c: the gradient of w is c."""

    def __init__(self, size: int) -> None:
        self.weight = nn.Parameter((size,), nn.normal(1.0))

    def forward(self, c: Any) -> mz.Tensor:
        return (self.weight * c).sum()


class Sums(nn.Module):
    """Parts that are reduced one by one, or all as one vector."""

    def __init__(self, sizes: list[int], as_one: bool) -> None:
        self.parts, self.as_one = [Part(size) for size in sizes], as_one

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("all", self)] if self.as_one else super().units()

    def forward(self, *cs: Any) -> mz.Tensor:
        total = tensor(np.float32(0))
        for part, c in zip(self.parts, cs, strict=True):
            total = total + part(c)
        return total


class Perceptron(nn.MLP):
    """An MLP whose layers are reduced one by one, or all as one vector."""

    def __init__(self, sizes: list[int], as_one: bool) -> None:
        super().__init__(sizes, seed=3)
        self.as_one = as_one

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("all", self)] if self.as_one else super().units()


def whole_numbers(sizes: list[int], step: int, rank: int) -> list[Any]:
    """Gradients whose sums are exact in whatever order they are added."""
    generator = np.random.default_rng([step, rank])
    return [generator.integers(-8, 9, size).astype(np.float32) for size in sizes]


def exactly(comm: Comm, as_one: bool) -> Facts:
    """With sums that are exact, the formula on whole vectors is the truth, and knows of no layout."""
    facts: Facts = {"compared": 0, "unlike": []}
    for sizes in SIZES:
        for stage in mz.STAGES:
            engine = stage(Sums(sizes, as_one), mz.SGD(0.25, momentum=0.5), comm)
            weights = list(engine.gather_parameters().values())
            moments = [np.zeros_like(w) for w in weights]
            for step in range(2):
                engine.backward(engine(*whole_numbers(sizes, step, comm.rank)))
                engine.step()
                for i in range(len(sizes)):
                    total = np.sum([whole_numbers(sizes, step, r)[i] for r in range(comm.size)], axis=0)
                    moments[i] = moments[i] * np.float32(0.5) + total / np.float32(comm.size)
                    weights[i] = weights[i] - moments[i] * np.float32(0.25)
            wanted: Flat = {f"parts.{i}.weight": w for i, w in enumerate(weights)}
            facts["unlike"] += unlike(engine.gather_parameters(), wanted, f"{stage.__name__}, {sizes}")
            facts["compared"] += len(weights)
    return facts


def gradients_reduced_as_one_vector_or_as_many_give_the_same_parameters(comm: Comm) -> Facts:
    draw, loss = drawn_from(PROBLEMS["mlp"]), PROBLEMS["mlp"].loss
    facts: Facts = {"exact, one": exactly(comm, True), "exact, many": exactly(comm, False)}
    ends = []
    for name, as_one in (("one", True), ("many", False)):
        facts[name] = {"compared": 0, "unlike": [], "still": []}
        for hidden in ([1], [17, 7, 2]):

            def make(rank: int, sizes: list[int] = [IN, *hidden, OUT], as_one: bool = as_one) -> nn.Module:  # noqa: B006
                return Perceptron(sizes, as_one)

            for key, value in against_truth(comm, make, lambda: mz.SGD(0.5, momentum=0.9), loss, draw).items():
                facts[name][key] += value
        ends.append(true_steps(make, lambda: mz.SGD(0.5, momentum=0.9), loss, draw, comm.size)[-1][0])
    facts["bits apart"] = len(unlike(ends[0], ends[1]))
    facts["apart"] = max(float(abs(x - ends[1][name]).max()) for name, x in ends[0].items())
    return facts


def two_micro_batches_add_up_in_every_stage_as_in_one_process(comm: Comm) -> Facts:
    problem = PROBLEMS["mlp"]
    return {
        kind: against_truth(comm, lambda rank: problem.build(), make, problem.loss, drawn_from(problem), micros=2)
        for kind, make in (("SGD", lambda: mz.SGD(0.5)), ("Adam", lambda: mz.Adam(0.05)))
    }


def clipping_by_one_norm_gives_the_same_update_on_all_ranks_and_in_all_stages(comm: Comm) -> Facts:
    problem = PROBLEMS["mlp"]

    def odd(rank: int) -> nn.Module:
        """49, 77 and 55 parameters."""
        return nn.Sequential(
            nn.Linear(6, 7), F.tanh, nn.Linear(7, 11, bias=False), F.tanh, nn.Linear(11, 5, bias=False), seed=1
        )

    facts = against_truth(
        comm, odd, lambda: mz.SGD(0.5, momentum=0.9), problem.loss, drawn_from(problem), steps=3, clip=CLIP
    )
    facts["after"] = []
    for stage in mz.STAGES:
        engine = stage(odd(0), mz.SGD(0.5), comm)
        engine.backward(problem.loss(engine, drawn_from(problem)(0, comm.rank, 0)))
        engine.clip_grad_norm(CLIP)
        facts["after"].append(engine.clip_grad_norm(CLIP))
    return facts


def a_tied_weight_stays_tied_and_is_counted_once_over_eight_steps(comm: Comm) -> Facts:
    problem = PROBLEMS["gpt tied"]
    facts = against_truth(
        comm, lambda rank: problem.build(), lambda: mz.Adam(0.02), problem.loss, drawn_from(problem, 2), steps=8
    )
    for stage in mz.STAGES:
        engine: Any = stage(problem.build(), mz.Adam(0.02), comm)
        engine.backward(problem.loss(engine, drawn_from(problem, 2)(0, comm.rank, 0)))
        engine.step()
        names = [name for name in whole(engine) if name.startswith(("token", "head"))]
        facts[stage.__name__] = {
            "tied": engine.model.head.weight is engine.model.token.weight,
            "names": names,
            "elements": sum(unit.size for unit in engine.units),
        }
    return facts


# Their relatives.


def two_engines_that_take_turns_have_the_bits_of_each_alone(comm: Comm) -> Facts:
    """They share communicator, optimizer and scratch memory; one makes two steps where the other makes one."""
    first, second = PROBLEMS["mlp"], PROBLEMS["twice"]
    draw, draw2 = drawn_from(first), drawn_from(second, group=1)
    wanted = true_steps(lambda rank: first.build(), lambda: mz.Adam(0.05), first.loss, draw, comm.size, 4)[-1][0]
    wanted2 = true_steps(lambda rank: second.build(5), lambda: mz.Adam(0.05), second.loss, draw2, comm.size, 2)[-1][0]
    facts: Facts = {"unlike": []}
    for stage in mz.STAGES:
        shared = mz.Adam(0.05)
        a, b = stage(first.build(), shared, comm), stage(second.build(5), shared, comm)
        for step in range(2):
            loss = first.loss(a, draw(2 * step, comm.rank, 0))
            loss2 = second.loss(b, draw2(step, comm.rank, 0))
            a.backward(loss)
            b.backward(loss2)
            a.step()
            a.backward(first.loss(a, draw(2 * step + 1, comm.rank, 0)))
            b.step()
            a.step()
        facts["unlike"] += unlike(whole(a), wanted, stage.__name__) + unlike(whole(b), wanted2, stage.__name__)
    return {**facts, "compared": len(mz.STAGES) * (len(wanted) + len(wanted2))}


def an_evaluation_between_micro_batches_leaves_no_trace(comm: Comm) -> Facts:
    """With dropout, whose random numbers would show a forward that counts."""
    problem = PROBLEMS["dropout"]

    def evaluate(engine: mz.Engine) -> None:
        engine.model.eval()
        with mz.no_grad():
            problem.loss(engine, drawn_from(problem, 9)(99, comm.rank, 0))
        engine.model.train()

    return against_truth(
        comm, lambda rank: problem.build(), lambda: mz.SGD(0.5, momentum=0.9), problem.loss, drawn_from(problem),
        micros=2, before=evaluate,
    )  # fmt: skip


def micro_batches_that_use_different_layers_add_up(comm: Comm) -> Facts:
    """The second of three leaves out the middle layer, on all ranks."""
    problem: Problem = PROBLEMS["skipping"]

    def draw(step: int, rank: int, micro: int) -> Batch:
        batch = drawn_from(problem)(step, rank, micro)
        return batch._replace(inputs=(*batch.inputs, micro == 1))

    return against_truth(
        comm, lambda rank: problem.build(), lambda: mz.SGD(0.5, momentum=0.9), problem.loss, draw, micros=3
    )
