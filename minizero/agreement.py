"""What must the ranks agree on before they may add up their gradients?

That they train the same model, that all have called `backward` equally often, and how many examples there were.
A few numbers from every rank go round the ring, and each rank draws the same conclusion from the same table.
Their bytes are counted as `control`.

A group may train one part of a model while other groups train the others (mesh.py). Then `comm.beyond` is the ring of
all their ranks. Gradients never leave the group. What is asked here about all gradients, such as their norm and
whether one of them is bad, has to be asked beyond it.
"""

from __future__ import annotations

import math
import mmap
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from . import optim, ring
from .comm import Communicator
from .flat import Unit
from .nn import Module
from .optim import all_finite

if TYPE_CHECKING:
    from .engine import Engine

Table = np.ndarray[Any, Any]


def exchange_facts(comm: Communicator, *facts: float) -> Table:
    """A few numbers from every rank, on every rank: (N, number of facts), float64. Collective."""
    table = np.zeros((comm.size, len(facts)))
    table[comm.rank] = facts
    with comm.label("control"):
        ring.all_gather(comm, table.reshape(-1))
    return table


def compare_models(engine: Engine) -> None:
    """Refuse models that are not the same on all ranks: training might go on with wrong numbers. Collective."""
    mine = [(p.name, p.shape, p.part, str(p.dtype), p.requires_grad) for p in engine.model.parameters()]
    names = f"{type(engine).__name__}, {type(engine.optimizer).__name__} {engine.optimizer.settings()}"
    facts = exchange_facts(engine.comm, zlib.crc32(f"{names} {mine}".encode()))
    others = np.flatnonzero(facts != facts[0]).tolist()
    if others:
        raise ValueError(
            f"ranks {others} wrap another model than rank 0: stage, optimizer, and name, shape, slice, dtype and "
            f"requires_grad of every parameter must be the same. Here on rank {engine.comm.rank}: {names}, "
            f"{len(mine)} parameters of {sum(unit.size for unit in engine.units)} elements"
        )
    if engine.comm.beyond:
        whole = engine.model.whole or summary(engine.model)
        facts = exchange_facts(engine.comm.beyond, zlib.crc32(f"{names} {engine.model.seed} {whole}".encode()))
        others = np.flatnonzero(facts != facts[0]).tolist()
        if others:
            raise ValueError(
                f"ranks {others} of the mesh differ from rank 0: stage, optimizer, seed and the model "
                f"that all have a part of must be the same. Here: {names}, seed {engine.model.seed}, {whole}"
            )


def summary(model: Module) -> str:
    """What all ranks of a mesh must build alike: the whole of it, whichever slices and layers are whose."""
    found = [
        (name, getattr(p, "whole", p.shape), p.part[1], str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    size = sum(math.prod(whole) for _, whole, *_ in found)
    return f"a model of {len(found)} parameters, {size} elements ({zlib.crc32(str(found).encode()):08x})"


def square_sums(engine: Engine) -> Table:
    """Σ g² of each (rank's chunk, trained parameter) of this group, float64: (N, parameters). Collective.

    The norm is *defined* on the chunks, in every stage: that way its bits do not depend on who holds what. A parameter
    that other groups hold as well counts in one of them, and here as 0.
    """
    units, all_of_it = [unit for unit in engine.units if unit.trainable], engine.comm.counts_copies
    counted = [all_of_it or parameter.part[1] > 1 for unit in units for parameter in unit.parameters]
    sums = optim.square_sums([part for unit in units for part in unit.own_parts()])
    return exchange_facts(engine.comm, *(each if here else 0.0 for each, here in zip(sums, counted, strict=True)))


def norm_of(comm: Communicator, squares: Table) -> float:
    """The root of all Σ g²: of this group's table, and of all other groups, if there are any. Collective."""
    total = math.fsum(squares.ravel())
    if comm.beyond:
        total = math.fsum(exchange_facts(comm.beyond, total if comm.rank == 0 else 0.0).ravel())
    return math.sqrt(total)


def shares(engine: Engine) -> dict[Unit, tuple[slice, bool]]:
    """What this rank keeps moments for: of each trained unit's vector a part, and whether everyone keeps all of it.

    Collective. ValueError where a stage gives the ranks neither all to each, nor each to one.
    """
    trained = [unit for unit in engine.units if unit.trainable]
    parts, counts = [], []
    for unit in trained:
        probe = np.frombuffer(mmap.mmap(-1, unit.length + 1), np.uint8, unit.length)  # addresses, and no memory:
        mine = engine.mine(unit, probe)  # where in it the answer lies is all that is asked
        first, step = mine.ctypes.data - probe.ctypes.data, mine.strides[0] if mine.size > 1 else 1
        if step < 1:
            raise ValueError(f"{type(engine).__name__}.mine gives the elements of {unit.name} in reverse order")
        parts.append(slice(first, first + step * mine.size, step) if mine.size else slice(0, 0, 1))
        counts.append(mine.size)
    sizes = exchange_facts(engine.comm, *counts)
    for unit, each in zip(trained, sizes.T, strict=True):
        if each.sum() != unit.length and not (each == unit.length).all():
            raise ValueError(f"{type(engine).__name__}.mine gives the ranks {each.tolist()} of the {unit.length} "
                             f"elements of {unit.name}: neither all to each, nor each to one")  # fmt: skip
    everywhere = (sizes == [unit.length for unit in trained]).all(axis=0).tolist()
    return {unit: (part, all_) for unit, part, all_ in zip(trained, parts, everywhere, strict=True)}


class Tally:
    """What this rank has put into its gradients since the last step.

    Attributes:
        count: Σ n over its `backward` calls: 1 each, or `examples` where given.
        given, omitted: calls of `backward` with and without `examples`.
        rows: examples in each call of `engine(x)`.
    """

    def __init__(self) -> None:
        self.count = self.given = self.omitted = 0
        self.rows: list[int] = []

    def add(self, examples: int | None) -> int:
        """Note one `backward`; return the weight of its gradients."""
        weight = 1 if examples is None else examples
        self.count += weight
        self.given += examples is not None
        self.omitted += examples is None
        return weight

    def agree(self, comm: Communicator, bad: bool) -> tuple[float, bool]:
        """Σ n over all ranks, and whether any rank has `bad` gradients. Collective.

        Raises on every rank alike where the ranks do not fit together or there is no example at all.
        """
        facts = exchange_facts(comm, self.count, self.given, self.omitted, sum(self.rows or [1]), bad)
        count, given, omitted, rows, bads = facts.sum(axis=0).tolist()
        calls = (facts[:, 1] + facts[:, 2]).astype(int).tolist()
        if len(set(calls)) > 1:
            raise RuntimeError(f"step: the ranks have called backward {calls} times since the last step or zero_grad: "
                               "all must call it equally often")  # fmt: skip
        if given and omitted:
            ranks = np.flatnonzero(facts[:, 2]).tolist()
            raise ValueError(f"backward: examples= must be given everywhere or nowhere; ranks {ranks} left it out")
        if count == 0 or (omitted and rows == 0):
            raise ValueError("step: no rank had a single example since the last step: there is no mean to take")
        if comm.beyond:
            everywhere = exchange_facts(comm.beyond, count, bads)
            counts, bads = everywhere[:, 0], everywhere[:, 1].sum()
            if (counts != count).any():
                raise RuntimeError(f"step: the groups of the mesh had {sorted(set(counts.tolist()))} examples: all "
                                   "parts of a model must be trained on the same")  # fmt: skip
        return count, bads > 0


def refuse_bad_numbers(comm: Communicator, units: list[Unit], step: int) -> None:
    """Raise FloatingPointError that names all parameters with inf or NaN in their gradients on any rank. Collective."""
    flags = [not all_finite(part) for unit in units for part in unit.own_parts()]
    anywhere = exchange_facts(comm, *flags).sum(axis=0).tolist()
    names = [p.name for unit in units for p in unit.parameters]
    bad = [name for name, ranks in zip(names, anywhere, strict=True) if ranks]
    if comm.beyond:
        exchange_facts(comm.beyond)  # MPI's allgather would wait for ever for a rank that has left
        bad = list(dict.fromkeys(name for group in comm.beyond.mpi.allgather(bad) for name in group))
    raise FloatingPointError(
        f"step {step}: the gradient of {', '.join(bad)} is not finite (inf or NaN); nothing was updated. "
        "Call zero_grad() and go on with the next batch, or look for the cause (learning rate, input, log of 0)"
    )
