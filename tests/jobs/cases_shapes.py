"""Cases about shapes: nothing, one number, primes, more ranks than elements; and rings of some of the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases_harness import Facts, against_truth, drawn_from, world

import minizero as mz
from minizero import functional as F
from minizero import nn, ring
from minizero.backend import to_host, xp
from minizero.operation import tensor
from models import IN, OUT, PROBLEMS, Leaf, Problem, frozen

Comm = mz.Communicator
MLP: Problem = PROBLEMS["mlp"]


def empty_and_scalar_parameters_train_and_keep_their_shapes(comm: Comm) -> Facts:
    """First, in the middle and last in a unit."""
    problem = PROBLEMS["odd shapes"]
    facts = against_truth(comm, lambda rank: problem.build(), lambda: mz.Adam(0.05), problem.loss, drawn_from(problem))
    for stage in mz.STAGES:
        engine = stage(problem.build(), mz.Adam(0.05), comm)
        engine.backward(problem.loss(engine, drawn_from(problem)(0, comm.rank, 0)))
        engine.step()
        weights, state = engine.gather_parameters(), engine.gather_optimizer_state()
        facts[stage.__name__] = {
            name: [list(x.shape), *(list(moment.shape) for moment in state[name].values())]
            for name, x in weights.items()
        }
    return facts


class Few(nn.Module):
    """x scaled by a few numbers."""

    def __init__(self, count: int) -> None:
        self.few = nn.Parameter((count,), nn.normal(1.0))

    def forward(self, x: Any) -> mz.Tensor:
        return x * (self.few.sum() + 2.0)


class Sparse(nn.Module):
    """Primes, units of 1, 2 and 3 elements, and modules without any."""

    def __init__(self) -> None:
        self.nothing, self.one, self.two, self.three = Leaf(), Few(1), Few(2), Few(3)
        self.first, self.second, self.last = nn.Linear(IN, 11), nn.Linear(11, 13, bias=False), nn.Linear(13, OUT)
        self.nothings = [Leaf(), nn.Sequential(Leaf())]

    def forward(self, x: Any) -> mz.Tensor:
        x = self.one(F.tanh(self.first(self.nothing(tensor(x)))))
        x = self.nothings[0](self.three(F.tanh(self.second(self.two(x)))))
        return self.last(F.tanh(x))


def prime_sizes_and_fewer_elements_than_ranks_train_right(comm: Comm) -> Facts:
    facts = against_truth(comm, lambda rank: Sparse(), lambda: mz.SGD(0.2, momentum=0.9), MLP.loss, drawn_from(MLP))
    engine = mz.Zero3(Sparse(), mz.SGD(0.2), comm)
    facts["units"] = {unit.name: [unit.size, unit.length, unit.weights.size] for unit in engine.units}
    return facts


def numbers(rank: int, count: int) -> Any:
    """Whole numbers, so that sums are exact: (rank + 1) x (1, 2, 3, ...)."""
    return xp.arange(1, count + 1).astype("float32") * (rank + 1)


def collectives_on_half_of_the_ranks_give_that_halfs_sums(comm: Comm) -> Facts:
    """Even and odd ranks, at the same time; then all of them together, which still works."""
    half = comm.split(comm.rank % 2)
    count = 3 * half.size
    return {
        "all_reduce": to_host(ring.all_reduce(half, numbers(comm.rank, count))).tolist(),
        "reduce_scatter": to_host(ring.reduce_scatter(half, numbers(comm.rank, count))).tolist(),
        "all_gather": to_host(ring.all_gather(half, numbers(comm.rank, count))).tolist(),
        "broadcast": to_host(ring.broadcast(half, numbers(comm.rank, count))).tolist(),
        "everyone": to_host(ring.all_reduce(comm, numbers(comm.rank, comm.size))).tolist(),
        "a half made by MPI": to_host(
            ring.all_reduce(mz.Communicator(world.mpi.Split(comm.rank % 2)), numbers(comm.rank, count))
        ).tolist(),
    }


# Their relatives.


class Hollow(nn.Module):
    """x, and what parameters without elements add to it."""

    def __init__(self) -> None:
        self.none, self.flat = nn.Parameter((0,), nn.normal(1.0)), nn.Parameter((3, 0, 2), nn.normal(1.0))

    def forward(self, x: Any) -> mz.Tensor:
        return x + self.none.sum() + self.flat.sum()


class Scaled(nn.Module):
    """A unit of one number without axes."""

    def __init__(self) -> None:
        self.scalar = nn.Parameter((), nn.normal(1.0))

    def forward(self, x: Any) -> mz.Tensor:
        return x * self.scalar


def a_unit_without_elements_takes_part_like_any_other(comm: Comm) -> Facts:
    def make(rank: int) -> nn.Module:
        return nn.Sequential(nn.Linear(IN, 7), Hollow(), Scaled(), nn.Linear(7, OUT))

    facts = against_truth(
        comm, make, lambda: mz.Adam(0.05, weight_decay=0.1), MLP.loss, drawn_from(MLP), micros=2, clip=0.1
    )
    engine = mz.Zero3(make(0), mz.Adam(0.05), comm)
    facts["units"] = {unit.name: [unit.size, unit.length] for unit in engine.units}
    return facts


def a_model_with_nothing_to_train_is_refused(comm: Comm) -> Facts:
    """A model without parameters, one that is all frozen, and a trained one whose forward uses none of it."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(IN, OUT)

        def forward(self, x: Any) -> mz.Tensor:
            return tensor(x)

    def all_frozen() -> nn.Module:
        return frozen(nn.Linear(IN, OUT))

    facts: Facts = {}
    for stage in mz.STAGES:
        for make in (Leaf, all_frozen, Unused):
            engine = stage(make(), mz.SGD(0.1), comm)
            refused = []
            loss = F.mean(engine(xp.ones((2, IN), "float32")))
            for call in (partial(engine.backward, loss), engine.step):
                try:
                    call()
                except (ValueError, RuntimeError) as error:
                    refused.append(str(error))
            facts[f"{make.__name__}, {stage.__name__}"] = refused
    return facts


def halves_with_their_ranks_reversed_train_as_they_would_alone(comm: Comm) -> Facts:
    """The half's rank 0, whose weights become everybody's, is the last of its ranks in the world."""
    color = comm.rank % 2
    half = comm.split(color, key=-comm.rank)
    last = [rank for rank in range(comm.size) if rank % 2 == color][-1]

    def make(rank: int) -> nn.Module:
        return MLP.build(seed=last - 2 * rank)  # of the world's rank

    facts = against_truth(half, make, lambda: mz.SGD(0.5, momentum=0.9), MLP.loss, drawn_from(MLP, group=color))
    return {**facts, "rank": half.rank, "size": half.size}
