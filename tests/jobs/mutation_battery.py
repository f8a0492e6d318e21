"""A fixed set of checks of all four stages, with three verdicts: numbers, memory, traffic.

    numbers   weights and optimizer state have the bits of the oracle on every rank, and padding stays zero
    memory    `engine.memory()` is the table's; what is alive after forward, in backward and at rest is no more than
              that; what a rank keeps of a state is the chunk with its own number
    traffic   the bytes sent, by operation, are those of the table

A verdict is a set of stages, "0" to "3", in which it is red on some rank. Without a fault it is empty.
"""

import gc
import sys
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lifetime_probe import before_each, drop_spare, live, spare, traced
from traffic_table import control, nonzero, padded, per_step, wire, wrapping

sys.path.insert(0, str(Path(__file__).parent.parent))

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import bfloat16, to_host
from oracle import Oracle, layout, same_bits

STEPS = 2
Vector = np.ndarray[Any, Any]


class Odd(nn.Module):
    """Odd sizes, a frozen layer between trained ones, and a layer that nobody uses."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.first, self.frozen, self.unused, self.last = (
            nn.Linear(inputs, outputs) for inputs, outputs in ((6, 13), (13, 7), (3, 5), (7, 4))
        )
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x: Any) -> mz.Tensor:
        return self.last(F.tanh(self.frozen(F.tanh(self.first(x)))))


def gpt(seed: int) -> nn.Module:
    return nn.GPT(vocab=13, context=5, width=8, heads=2, layers=1, dropout=0.1, seed=seed, dtype="bfloat16")


def draw_vectors(generator: np.random.Generator, examples: int) -> tuple[Vector, Vector]:
    return generator.standard_normal((examples, 6), np.float32), generator.integers(0, 4, examples)


def draw_tokens(generator: np.random.Generator, examples: int) -> tuple[Vector, Vector]:
    return generator.integers(0, 13, (examples, 5)), generator.integers(0, 13, (examples, 5))


@dataclass
class Problem:
    """What is trained, and the truth about it once it is known."""

    make: Callable[[int], nn.Module]  # seed -> model
    draw: Callable[[np.random.Generator, int], tuple[Vector, Vector]]
    optimizer: Callable[[], mz.Optimizer]
    uneven: bool  # slices of 1 to 3 examples, said to `backward`; and every rank starts from another seed
    clip: float | None
    micros: int
    state_bytes: int  # per trained element
    unused: list[int] = field(default_factory=list)  # elements of trained units that are reduced, and never gathered
    weights: dict[str, Vector] = field(default_factory=dict)
    state: dict[str, dict[str, Vector]] = field(default_factory=dict)

    def examples(self, rank: int, micro: int) -> int:
        return 1 + (rank + micro) % 3 if self.uneven else 2

    def batch(self, step: int, rank: int, micro: int) -> tuple[Vector, Vector]:
        return self.draw(np.random.default_rng([step, rank, micro]), self.examples(rank, micro))

    def solve(self, n: int) -> None:
        oracle = Oracle(self.make(0), self.optimizer(), n)
        for step in range(STEPS):
            batches = [[self.batch(step, rank, micro) for micro in range(self.micros)] for rank in range(n)]
            counts = [[self.examples(rank, micro) for micro in range(self.micros)] for rank in range(n)]
            oracle.step(loss_of, batches, examples=counts if self.uneven else None, clip=self.clip)
        self.weights, self.state = oracle.weights, oracle.state


def loss_of(model: Any, batch: tuple[Vector, Vector]) -> mz.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


PROBLEMS = [
    Problem(Odd, draw_vectors, lambda: mz.SGD(0.5, momentum=0.9), True, None, 2, 4, [20]),
    Problem(gpt, draw_tokens, lambda: mz.Adam(0.02, weight_decay=0.1), False, 0.05, 1, 8),
]


class Verdict:
    """Which stages are red, and the first reason on this rank."""

    def __init__(self) -> None:
        self.red: defaultdict[str, set[str]] = defaultdict(set)
        self.why: dict[str, str] = {}

    def check(self, kind: str, stage: type[mz.Engine], good: Any, why: str) -> None:
        if not good:
            self.red[kind].add(str(mz.STAGES.index(stage)))
            self.why.setdefault(kind, f"{stage.__name__}: {why}")

    def of_all_ranks(self, comm: mz.Communicator) -> dict[str, str]:
        everyone = comm.mpi.allgather(dict(self.red))
        return {kind: "".join(sorted(set().union(*(red.get(kind, set()) for red in everyone)))) for kind in KINDS}


KINDS = ("numbers", "memory", "traffic")


def data_rank(comm: mz.Communicator) -> int:
    """Whose slice of the data this rank reads: a fault may plant another."""
    return comm.rank


def elements(model: nn.Module, trained: bool) -> list[int]:
    parameters = dict(model.named_parameters())
    units = [[parameters[name] for name in names] for names in layout(model)]
    return [sum(p.size for p in unit) for unit in units if unit[0].requires_grad == trained]


def shares(stage: type[mz.Engine], trained: int, frozen: int, b: int, state: int, n: int) -> dict[str, int]:
    """Bytes at rest, by term."""
    w, g, o = ((1, 1, 1), (1, 1, n), (1, n, n), (n, n, n))[mz.STAGES.index(stage)]
    return {"weights": b * (trained + frozen) // w, "gradients": b * trained // g, "optimizer": state * trained // o}


def train(stage: type[mz.Engine], problem: Problem, comm: mz.Communicator, verdict: Verdict) -> None:
    n = comm.size
    model = problem.make(comm.rank if problem.uneven else 0)
    trained, frozen = elements(model, True), elements(model, False)
    b = model.parameters()[0].dtype.itemsize
    sent, unsent = wire(trained, b, n), wire(frozen, b, n)
    table = shares(
        stage, sum(padded(u, n) for u in trained), sum(padded(u, n) for u in frozen), b, problem.state_bytes, n
    )
    parameters = sum(p.requires_grad for p in model.parameters())

    def traffic(what: str, expected: dict[str, int]) -> None:
        found = nonzero(comm.traffic)
        comm.traffic.clear()
        verdict.check("traffic", stage, found == nonzero(expected), f"{what}: {found}, not {nonzero(expected)}")

    comm.traffic.clear()
    engine = stage(model, problem.optimizer(), comm)
    traffic("wrapping", wrapping(sent + unsent, n))
    for step in range(STEPS):
        for micro in range(problem.micros):
            loss = loss_of(engine, problem.batch(step, data_rank(comm), micro))
            engine.backward(loss, examples=problem.examples(comm.rank, micro) if problem.uneven else None)
        if step == STEPS - 1:
            held = engine.memory()
            verdict.check("memory", stage, held == table, f"memory() is {held}, not {table}")
        if problem.clip:
            engine.clip_grad_norm(problem.clip)
        engine.step()
        expected = per_step(stage.__name__, sent, n, problem.micros, False, 2 * problem.micros * unsent)
        if stage is mz.Zero3:
            expected["all_gather"] -= 2 * problem.micros * wire(problem.unused, b, n)
        expected["control"] = control(n, parameters, problem.clip is not None)
        traffic(f"step {step + 1}", expected)
    compare(stage, engine, problem, verdict)


def compare(stage: type[mz.Engine], engine: mz.Engine, problem: Problem, verdict: Verdict) -> None:
    weights, state = engine.gather_parameters(), engine.gather_optimizer_state()
    for name, truth in problem.weights.items():
        verdict.check("numbers", stage, same_bits(weights[name], truth), f"{name} differs")
    verdict.check("numbers", stage, state.keys() == problem.state.keys(), f"there is state for {sorted(state)}")
    for name, found in state.items():
        for key, truth in problem.state.get(name, {}).items():
            same = same_bits(found[key].reshape(truth.shape), truth)
            verdict.check("numbers", stage, same, f"{key} of {name} differs")

    rank, n = engine.comm.rank, engine.comm.size
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    for unit in engine.units:
        held = {"weights": unit.weights, **(unit.state or {})}
        for key, vector in held.items():
            length = unit.length // n if vector.size < unit.length else unit.length
            first = length * rank if vector.size < unit.length else 0
            real = min(max(unit.size - first, 0), length)
            if vector.size < unit.length:
                parts = [weights[names[p]] if key == "weights" else state[names[p]][key] for p in unit.parameters]
                whole = np.concatenate([part.reshape(-1) for part in parts])
                mine = same_bits(to_host(vector)[:real], whole[first : first + real])
                verdict.check("memory", stage, mine, f"{key} here is not chunk {rank}")
            if key == "weights":
                padding = to_host(vector)[real:].astype(np.float32)
                verdict.check("numbers", stage, not padding.any(), f"padding became {padding}")


# What is alive: six equal layers, bfloat16 and Adam, two steps.

WIDTH, LAYERS, BATCH = 75, 6, 2
LAYER = WIDTH * (WIDTH + 1)  # elements
ACTIVATIONS = LAYERS * 2 * BATCH * WIDTH * 4
SLACK = 1024


def watch(stage: type[mz.Engine], comm: mz.Communicator) -> Iterator[tuple[str, int, int]]:
    """(what, bytes alive or more than before, bytes allowed) at each look."""
    layer = padded(LAYER, comm.size) * 2
    table = shares(stage, layer // 2 * LAYERS, 0, 2, 8, comm.size)
    x = np.random.default_rng(comm.rank).standard_normal((BATCH, WIDTH), np.float32)
    y = np.arange(BATCH)
    gc.collect()
    drop_spare(comm)
    tracemalloc.start()
    engine = stage(nn.MLP([WIDTH] * (LAYERS + 1), dtype="bfloat16"), mz.Adam(), comm)

    def alive() -> int:
        return live() - spare(engine)

    try:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
        start = alive()
        loss = F.cross_entropy(engine(x), y)
        yield "left by forward", alive() - start, ACTIVATIONS + SLACK
        before, most = traced(), [0]
        with before_each(engine, "reduce", lambda: most.append(traced())):
            engine.backward(loss)
        # whole, and of one unit only: its weights and its gradient
        yield "in backward", max(most) - before, table["gradients"] + 2 * layer
        yield "at rest", alive(), sum(table.values()) + SLACK
        engine.step()
        yield "after the step", alive(), sum(table.values()) - table["gradients"] + SLACK
    finally:
        tracemalloc.stop()


def battery(comm: mz.Communicator) -> Verdict:
    """Everything, once. Collective."""
    verdict = Verdict()
    for stage in mz.STAGES:
        for problem in PROBLEMS:
            train(stage, problem, comm, verdict)
        for what, found, allowed in watch(stage, comm):
            verdict.check("memory", stage, found <= allowed, f"{what} {found} bytes, not {allowed}")
    gc.collect()
    return verdict


def prepare(comm: mz.Communicator) -> None:
    """The truth, before anything is planted."""
    assert {p.dtype for p in gpt(0).parameters()} == {bfloat16}
    for problem in PROBLEMS:
        problem.solve(comm.size)
    gc.disable()
    gc.freeze()  # so that `collect` looks only at what is new
