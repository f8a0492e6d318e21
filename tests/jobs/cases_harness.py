"""What do the cases' jobs share: one case after another, each fenced off, and training beside the truth.

A case is a function (communicator) -> facts. Each has a communicator of its own. Where it raises on some ranks, the
others, who may wait for these, are told by the message that a broken collective sends: they raise, too, and all of
them go on with the next case.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import minizero as mz
from minizero import comm as comm_module
from minizero.backend import xp
from models import Batch, Problem
from oracle import Oracle, Vector, differing

Facts = dict[str, Any]
Flat = dict[str, Vector]  # weights and optimizer state, by name
Draw = Callable[[int, int, int], Any]  # (step, rank, micro-batch) -> what the loss takes
Loss = Callable[..., mz.Tensor]  # (model or engine, that) -> one number
Make = Callable[[int], mz.nn.Module]  # rank -> a new model

world = mz.Communicator()
_news: list[Any] = []  # requests of messages that somebody will read at exit


def run(cases: Mapping[str, Any]) -> None:
    """Run the cases that the command line names; rank 0 appends what each found to the file named before them.

    mpirun -n 3 python tests/jobs/cases_training.py /dev/stdout a_layer_used_twice_is_trained_right
    """
    path, *names = sys.argv[1:]
    cases = {"fails_on_one_rank": fails_on_one_rank, **cases}
    for name in names:
        comm = world.split(0)
        rings = len(comm_module._rings) - 1
        try:
            facts: Facts = cases[name](comm)
        except Exception:
            facts = {"error": traceback.format_exc()}
            for ring in comm_module._rings[rings:]:
                where = f"{name} has failed on rank {world.rank}"
                _news.append(ring.isend(where, (ring.rank + 1) % ring.size, comm_module.FAILED))
        everywhere = world.mpi.gather(facts)
        if world.rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps([name, everywhere]) + "\n")


def fails_on_one_rank(comm: mz.Communicator) -> Facts:
    """A case for the fence itself: rank 1 leaves a collective that the others are in."""
    if comm.rank == 1:
        raise ZeroDivisionError
    return {"sum": float(mz.ring.all_reduce(comm, xp.ones(comm.size)).sum())}


def drawn_from(problem: Problem, examples: int = 4, dtype: Any = "float32", group: int = 0) -> Draw:
    """Random batches, of their own for each step, rank, micro-batch and group of ranks."""

    def draw(step: int, rank: int, micro: int) -> Batch:
        return problem.draw(np.random.default_rng([step, rank, micro, group]), examples, dtype)

    return draw


def flat(weights: Mapping[str, Vector], state: Mapping[str, Mapping[str, Vector]]) -> Flat:
    return {**weights, **{f"{name}:{key}": x for name, kept in state.items() for key, x in kept.items()}}


def whole(engine: mz.Engine) -> Flat:
    """All weights and all state. Collective."""
    return flat(engine.gather_parameters(), engine.gather_optimizer_state())


def unlike(found: Flat, wanted: Flat, where: str = "") -> list[str]:
    """What is not the same to the last bit, in words."""
    words = [f"{where}: {name} is missing or too many" for name in sorted(found.keys() ^ wanted.keys())]
    for name in found.keys() & wanted.keys():
        x, y = found[name], wanted[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            words.append(f"{where}: {name} is {x.dtype} {x.shape} instead of {y.dtype} {y.shape}")
        elif differing(x, y):
            words.append(f"{where}: {name} differs in {differing(x, y)} of {x.size} elements")
    return words


def still(start: Flat, end: Flat) -> list[str]:
    """The tensors that have elements, and have not moved in a single bit."""
    return [name for name, x in start.items() if x.size and not differing(x, end[name])]


def true_steps(
    make: Make,
    optimizer: Callable[[], mz.Optimizer],
    loss: Loss,
    draw: Draw,
    n: int,
    steps: int = 2,
    micros: int = 1,
    clip: float | None = None,
) -> list[tuple[Flat, float | None]]:
    """Weights, state and norm at the start and after each step, as one process finds them for n ranks."""
    truth = Oracle(make(0), optimizer(), n)
    found: list[tuple[Flat, float | None]] = [(dict(truth.weights), None)]
    for step in range(steps):
        batches = [[draw(step, rank, micro) for micro in range(micros)] for rank in range(n)]
        norm = truth.step(loss, batches, clip=clip)
        found.append((flat(truth.weights, truth.state), norm))
    return found


def against_truth(
    comm: mz.Communicator,
    make: Make,
    optimizer: Callable[[], mz.Optimizer],
    loss: Loss,
    draw: Draw,
    steps: int = 2,
    micros: int = 1,
    clip: float | None = None,
    stages: tuple[type[mz.Engine], ...] = mz.STAGES,
    before: Callable[[mz.Engine], None] = lambda engine: None,
) -> Facts:
    """Train in each stage and compare every tensor with the truth, at the start and after every step. Collective.

    Args:
        make: a new model for this rank; training starts from that of rank 0.
        before: called before each backward.

    Returns facts. compared: how many tensors were. unlike: what differs, in words. still: what has not moved.
    norms: by stage, those of every step (with `clip`).
    """
    truth = true_steps(make, optimizer, loss, draw, comm.size, steps, micros, clip)
    facts: Facts = {"compared": 0, "unlike": [], "still": still(truth[0][0], truth[-1][0])}
    norms: dict[str, list[float | None]] = {"truth": [norm for _, norm in truth[1:]]}
    for stage in stages:
        engine = stage(make(comm.rank), optimizer(), comm)
        found = norms[stage.__name__] = []
        for step in range(steps + 1):
            for micro in range(micros if step else 0):
                before(engine)
                engine.backward(loss(engine, draw(step - 1, comm.rank, micro)))
            if step:
                found += [engine.clip_grad_norm(clip)] if clip else [None]
                engine.step()
            facts["unlike"] += unlike(whole(engine), truth[step][0], f"{stage.__name__}, step {step}")
            facts["compared"] += len(truth[step][0])
    return {**facts, "norms": norms} if clip else facts
