"""Do all stages train any model alike, and as they should? Models come in as JSON, one a line; verdicts go out.

    mpirun -n 8 python tests/jobs/random_models.py [models.jsonl]       # without a file: from stdin, line by line

One job carries any number of models, so that hypothesis can ask for simpler and simpler ones. Rank 0 reads; a model
for N ranks is trained by ranks 0 to N-1, and the others sleep. What a line may say is what the strategies of
test_random_models.py draw. The verdict:

    equal   do all stages have the bits of the truth (oracle.py), on every rank and after every step: weights, optimizer
            state and padding as they are held, losses and norms; and at the end, gathered by name?
    where   if not: for each stage, what differs first, and on which rank
    error   where an exception ended it: its text. The ranks may no longer fit together then: start a new job
    facts   what this model was an example of, beyond what its line says
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.autograd import Tensor
from minizero.backend import to_host, working, xp
from minizero.flat import Unit
from minizero.nn import Module, Parameter, constant, normal
from oracle import Oracle, Vector, bits, differing, layout, same_bits

IN, CLASSES = 3, 3
PATIENCE = 10.0  # seconds that a rank which failed waits for the others to fail, too
Spec = dict[str, Any]
Flat = dict[str, Vector]  # weights by name, state by "name:key"

# The models. Every module takes any width and dtype: what comes in is cut or repeated, and converted, until it fits.


def fit(x: Any, width: int, dtype: Any) -> Tensor:
    """x (..., any) as (..., width), in the dtype that `dtype` computes in."""
    x = x if isinstance(x, Tensor) else Tensor(x)
    if x.dtype != working(np.dtype(dtype)):
        x = x.astype(working(np.dtype(dtype)))
    if x.shape[-1] == 0:
        x = x.sum(axis=-1, keepdims=True)
    if x.shape[-1] < width:
        x = F.concatenate([x] * -(-width // x.shape[-1]), axis=-1)
    return x if x.shape[-1] == width else x[..., :width]


class Turn(NamedTuple):
    """What a forward may depend on besides its input."""

    ids: Any  # integers of the input's shape without its last axis
    number: int  # of step and micro-batch
    rank: int


def call(module: Module, x: Any, turn: Turn) -> Tensor:
    if isinstance(module, nn.Linear):
        return F.tanh(module(fit(x, module.weight.shape[1], module.weight.dtype)))
    if isinstance(module, nn.LayerNorm):
        return module(fit(x, module.gain.size, module.gain.dtype)) * 0.5
    if isinstance(module, nn.Embedding):
        rows = module(turn.ids % module.weight.shape[0])
        return rows + fit(x, rows.shape[-1], rows.dtype)
    if isinstance(module, nn.Dropout):
        return module(x)
    return module(x, turn)


class Plain(Module):
    """No parameters."""

    def forward(self, x: Any, turn: Turn) -> Tensor:
        return F.gelu(x)


class Scale(Module):
    """Elementwise parameters of any shapes: those that can be are broadcast, of others the sum is added."""

    def __init__(self, shapes: list[list[int]], dtype: str) -> None:
        self.scales = [Parameter(shape, normal(0.5), dtype) for shape in shapes]

    def forward(self, x: Any, turn: Turn) -> Tensor:
        for scale in self.scales:
            x = fit(x, x.shape[-1], scale.dtype)
            if len(scale.shape) < 2 and scale.size:
                x = F.tanh(fit(x, scale.shape[0], scale.dtype) if scale.shape > (1,) else x) * (scale + 1.0)
            else:
                x = F.tanh(x + (scale * scale).sum() - scale.sum())
        return x


class Tied(Module):
    """A product with someone else's weight (rows, columns), transposed, and its first row."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, x: Any, turn: Turn) -> Tensor:
        y = fit(x, self.weight.shape[1], self.weight.dtype) @ self.weight.T
        return F.tanh(y + self.weight[:1].sum())


class Tree(Module):
    """Modules in attributes, lists, tuples or dicts, and maybe a parameter of its own (shift).

    chain: one after another. residual: x + chain(x). twice: chain(chain(x)). unused: x. sometimes: every second time.
    by rank: not on every second rank.
    """

    def __init__(self, how: str, mode: str, children: list[Module], shift: Parameter | None) -> None:
        self.how, self.mode, self.count = how, mode, len(children)
        if shift is not None and mode == "chain":  # before all others; else behind them
            self.shift = shift
        if how == "attributes":
            for i, child in enumerate(children):
                setattr(self, f"part{i}", child)
        else:
            self.parts: Any = {
                "list": children,
                "tuple": tuple(children),
                "dict": {f"key{i}": child for i, child in enumerate(children)},
                "nested": {"lists": [(child,) for child in children]},
            }[how]
        if shift is not None:
            self.shift = shift

    def children(self) -> Iterator[Module]:
        if self.how == "attributes":
            yield from (getattr(self, f"part{i}") for i in range(self.count))
        elif self.how == "nested":
            yield from (child for (child,) in self.parts["lists"])
        else:
            yield from self.parts.values() if isinstance(self.parts, dict) else self.parts

    def chain(self, x: Any, turn: Turn) -> Tensor:
        if hasattr(self, "shift"):
            x = fit(x, x.shape[-1], self.shift.dtype) + self.shift
        for child in self.children():
            x = call(child, x, turn)
        return x if isinstance(x, Tensor) else Tensor(x)

    def forward(self, x: Any, turn: Turn) -> Tensor:
        skipped = {"unused": True, "sometimes": turn.number % 2 == 1, "by rank": turn.rank % 2 == 0}
        if skipped.get(self.mode):
            return x if isinstance(x, Tensor) else Tensor(x)
        if self.mode == "twice":
            x = self.chain(x, turn)
        y = self.chain(x, turn)
        return F.tanh(fit(x, y.shape[-1], y.dtype) + y) if self.mode == "residual" else y


class Model(Tree):
    """The outermost tree, with a head that is always trained, and a choice of units."""

    def __init__(self, spec: Spec, children: list[Module], shift: Parameter | None, seed: int) -> None:
        super().__init__(spec["how"], "chain", children, shift)
        self.seed, self.choice = seed, spec["units"]
        self.head = nn.Linear(spec["head"], CLASSES, dtype=spec["dtype"])
        self.head.bias = Parameter((CLASSES,), constant(0), spec["dtype"])

    def forward(self, x: Any, turn: Turn) -> Tensor:
        return self.head(fit(self.chain(x, turn), self.head.weight.shape[1], self.head.weight.dtype))

    def units(self) -> list[tuple[str, Module]]:
        if self.choice == "whole":
            return [("whole", self)]
        if self.choice == "none":
            return []
        if self.choice == "leaves":
            return [(path, m) for path, m in self.named_modules() if path and next(m._members(Parameter), None)]
        found = super().units()
        return found[::-1] if self.choice == "reversed" else found


def build(spec: Spec, seed: int) -> Model:
    """A new model; nothing is drawn yet."""
    made: list[Module] = []  # what can be shared: finished modules, so that none contains itself

    def node(spec: Spec) -> Module:
        module = new(spec)
        for parameter in module.parameters() if spec.get("frozen") is True else []:
            parameter.requires_grad = False
        own = [parameter for _, parameter in module._members(Parameter)]
        for parameter, frozen in zip(own, spec.get("freeze", []), strict=False):
            parameter.requires_grad &= not frozen
        made.append(module)
        return module

    def new(spec: Spec) -> Module:
        kind, dtype = spec["kind"], spec.get("dtype", "float32")
        if kind == "tree":
            shift = Parameter(spec["shift"], normal(0.5), dtype) if spec["shift"] is not None else None
            return Tree(spec["how"], spec["mode"], [node(child) for child in spec["children"]], shift)
        if kind == "linear":
            return nn.Linear(spec["inputs"], spec["outputs"], spec["bias"], dtype)
        if kind == "norm":
            return nn.LayerNorm(spec["width"], dtype=dtype)
        if kind == "embedding":
            return nn.Embedding(spec["count"], spec["width"], dtype, normal(0.5))
        if kind == "scale":
            return Scale(spec["shapes"], dtype)
        if kind == "dropout":
            return nn.Dropout(0.4)
        if kind == "plain":
            return Plain()
        if not made:  # there is nothing to share yet
            made.append(nn.Linear(3, 2, dtype=dtype))
            other = made[0] if kind == "same" else Tied(made[0].parameters()[0])
            return Tree("list", "chain", [made[0], other], None)
        if kind == "same":
            return made[-1 - spec["back"] % len(made)]
        weights = [p for module in made for p in module.parameters() if len(p.shape) == 2 and p.shape[1]]
        return Tied(weights[-1 - spec["back"] % len(weights)]) if weights else Plain()

    children = [node(child) for child in spec["children"]]
    shift = Parameter(spec["shift"], normal(0.5), spec["dtype"]) if spec["shift"] is not None else None
    return Model(spec, children, shift, seed)


def stages_of(spec: Spec) -> tuple[type[mz.Engine], ...]:
    """Under ZeRO-3 every rank must run the same units: where ranks differ, it is left out."""
    modes = {module.mode for _, module in build(spec, 0).named_modules() if isinstance(module, Tree)}
    return mz.STAGES[:3] if "by rank" in modes and spec["n"] > 1 else mz.STAGES


def optimizer_of(spec: Spec) -> mz.Optimizer:
    kind = spec["optimizer"]
    if kind in ("sgd", "momentum"):
        return mz.SGD(1.0, 0.9 if kind == "momentum" else 0.0, spec["master"])
    return mz.Adam(0.1, weight_decay=0.5 if kind == "adam with decay" else 0.0, master=spec["master"])


# The data, and what follows from it.


class Batch(NamedTuple):
    x: Any
    turn: Turn
    targets: Any


def batch_of(spec: Spec, step: int, rank: int, micro: int) -> Batch:
    """The same data for the engines and for the oracle."""
    generator = np.random.default_rng([spec["seed"], step, rank, micro])
    shape: tuple[int, ...] = (spec["steps"][step]["rows"][rank][micro], *spec["time"])
    x = generator.standard_normal((*shape, IN)).astype(working(np.dtype(spec["dtype"])))
    ids, targets = (xp.asarray(generator.integers(0, high, shape)) for high in (1000, CLASSES))
    return Batch(xp.asarray(x), Turn(ids, step + micro, rank), targets)


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.turn), batch.targets)


def taken(step: Spec) -> str:
    """What becomes of a step: "taken", "refused" for want of a single example, or "abandoned" by `zero_grad`."""
    if step["abandon"]:
        return "abandoned"
    return "taken" if sum(map(sum, step["rows"])) else "refused"


class Truth(NamedTuple):
    """What one step leads to."""

    tensors: Flat
    losses: list[list[float]]  # [rank][micro-batch]; empty where the step was not taken
    norm: float | None


def flat(weights: Flat, state: dict[str, Flat]) -> Flat:
    return {**weights, **{f"{name}:{key}": x for name, kept in state.items() for key, x in kept.items()}}


def truth_of(spec: Spec) -> tuple[list[Truth], list[str]]:
    """The start, and what follows from each step, by one process alone; and facts."""
    n, optimizer = spec["n"], optimizer_of(spec)
    oracle = Oracle(build(spec, spec["seed"]), optimizer, n)
    truth = [Truth(dict(oracle.weights), [], None)]
    facts, used = set[str](), set[str]()
    for number, step in enumerate(spec["steps"]):
        losses, norm = [], None
        facts.add(f"a step was {taken(step)}")
        if taken(step) == "taken":
            micros = len(step["no_sync"])
            batches = [[batch_of(spec, number, rank, micro) for micro in range(micros)] for rank in range(n)]
            examples = step["rows"] if step["examples"] else None
            norm = oracle.step(loss_of, batches, examples=examples, no_sync=step["no_sync"], clip=step["clip"])
            losses = oracle.losses
            used |= {name for name, g in oracle.gradients.items() if g.any()}
            if norm is not None:
                facts.add("clipped" if norm > step["clip"] else "within the norm")
            optimizer.lr *= spec["decay"]
        truth.append(Truth(flat(oracle.weights, oracle.state), losses, norm))
    trained = {name for name, parameter in oracle.parameters.items() if parameter.requires_grad}
    start = truth[0].tensors
    moved = {name for name, x in start.items() if any(differing(x, later.tensors[name]) for later in truth)}
    assert moved <= trained, f"the oracle has trained {moved - trained}, frozen"
    # Equality of what never moves proves nothing. (Where all examples look alike and no class is more frequent than
    # the others, there is nothing to learn.) The bias of the head starts at zero: the smallest gradient moves it.
    assert "head.bias" in moved or "head.bias" not in used, f"the head was not moved by {oracle.gradients['head.bias']}"
    facts |= {"moved"} if moved else set()
    facts |= {"trained without gradient"} if used and any(start[name].size for name in trained - used) else set()
    return truth, sorted(facts)


def facts_of(model: Module, units: list[Unit], n: int) -> set[str]:
    """What this model is an example of: its sharing, its freezing and its units."""
    modules = [module for _, module in model.named_modules()]
    holders = [parameter for module in modules for _, parameter in module._members(Parameter)]
    parents = [child for module in modules for _, child in module._members(Module)]
    in_part = any(len({p.requires_grad for p in module.parameters()}) == 2 for module in modules if module is not model)
    facts = {
        "shared parameter": len(holders) > len(set(holders)),
        "shared module": len(parents) > len(set(parents)),
        "module frozen in part": in_part,
        "two dtypes": len({unit.dtype for unit in units}) > 1,
        "root unit": any(unit.module is model for unit in units) and any(unit.module is not model for unit in units),
        "frozen unit": any(not unit.trainable for unit in units),
        "padding": any(unit.length > unit.size for unit in units),
        "empty unit": any(unit.size == 0 for unit in units),
        "more ranks than elements": any(0 < unit.size < n for unit in units),
        "empty parameter beside others": any(unit.size and not all(p.size for p in unit.parameters) for unit in units),
        "master copy": any("master" in (unit.state or {}) for unit in units),
    }
    return {fact for fact, holds in facts.items() if holds}


# The comparison.


def difference(found: Vector, wanted: Vector) -> str:
    """In words; empty where there is none."""
    if same_bits(found, wanted):
        return ""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {found.dtype} {found.shape} instead of {wanted.dtype} {wanted.shape}"
    first = int(np.flatnonzero(bits(found) != bits(wanted))[0])
    pair = f"{found.reshape(-1)[first]!r} instead of {wanted.reshape(-1)[first]!r}"
    return f"differs in {differing(found, wanted)} of {wanted.size} elements, the first is number {first}: {pair}"


class Differs(Exception):  # noqa: N818  # it is an answer
    """A stage has other bits than the truth."""


def same(what: str, found: Any, wanted: Any) -> None:
    """Raise Differs unless two arrays, numbers or None are the same to the last bit."""
    if isinstance(wanted, np.ndarray):
        text = difference(found, wanted) if isinstance(found, np.ndarray) else f"is {found!r}"
    else:
        text = "" if found == wanted else f"is {found!r} instead of {wanted!r}"
    if text:
        raise Differs(f"{what} {text}")


def same_held(engine: mz.Engine, names: list[list[str]], truth: Flat) -> None:
    """Is all that this rank holds, whole or its own chunk, what it should be, padding included?"""
    n, rank = engine.comm.size, engine.comm.rank
    same("the parameters of the units", [[p.name for p in unit.parameters] for unit in engine.units], names)
    for unit, members in zip(engine.units, names, strict=True):
        keys = sorted({name.partition(":")[2] for name in truth if name.partition(":")[0] == members[0]} - {""})
        same(f"the state of {unit.name}", sorted(unit.state or {}), keys)
        held = {"": unit.weights, **(unit.state or {})}
        for key, vector in held.items():
            parts = [truth[f"{name}:{key}" if key else name].reshape(-1) for name in members]
            size = sum(part.size for part in parts)
            whole = np.concatenate([*parts, np.zeros(-size % n, parts[0].dtype)])
            if vector.size == whole.size // n:
                whole = np.split(whole, n)[rank]
            same(f"{key or 'the vector'} of unit {unit.name} ({', '.join(members)})", to_host(vector), whole)


def train(engine: mz.Engine, spec: Spec, number: int) -> tuple[list[float], float | None]:
    """One step; the losses and the norm."""
    step, rank = spec["steps"][number], engine.comm.rank
    losses, norm = [], None
    for micro, no_sync in enumerate(step["no_sync"]):
        loss = loss_of(engine, batch_of(spec, number, rank, micro))
        losses.append(loss.item())
        examples = step["rows"][rank][micro] if step["examples"] else None
        if no_sync:
            with engine.no_sync():
                engine.backward(loss, examples=examples)
        else:
            engine.backward(loss, examples=examples)
    if taken(step) == "abandoned":
        engine.zero_grad()
        return [], None
    try:
        if step["clip"] is not None:
            norm = engine.clip_grad_norm(step["clip"])
        engine.step()
    except ValueError as error:
        if taken(step) != "refused" or "no rank had a single example" not in str(error):
            raise
        engine.zero_grad()
        return [], None
    return losses, norm


def compare(stage: type[mz.Engine], spec: Spec, truth: list[Truth], comm: mz.Communicator) -> set[str]:
    """Train all steps; raise Differs, naming the step and what differs. Return facts.

    What differs is raised when all is done: the other ranks go on, and would wait.
    """
    optimizer = optimizer_of(spec)
    model = build(spec, spec["seed"] + (comm.rank if spec["own_seeds"] else 0))
    names = layout(model)
    first: list[str] = []

    def check(where: str, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Differs as differs:
            first.append(f"{where}, {differs}")

    engine = stage(model, optimizer, comm)
    check("after wrapping", same_held, engine, names, truth[0].tensors)
    for number in range(len(spec["steps"])):
        losses, norm = train(engine, spec, number)
        wanted = truth[number + 1]
        where = f"step {number + 1}"
        if not np.isfinite(losses).all():
            first.append(f"{where}: the losses are {losses}")
        check(where, same, "the losses", losses, wanted.losses[comm.rank] if wanted.losses else [])
        check(where, same, "the norm", norm, wanted.norm)
        check(where, same_held, engine, names, wanted.tensors)
        if wanted.losses:
            optimizer.lr *= spec["decay"]
    if stage is stages_of(spec)[-1]:  # once is enough: what is held was looked at everywhere
        found = flat(engine.gather_parameters(), engine.gather_optimizer_state())
        check("gathered", same, "what there is", sorted(found), sorted(truth[-1].tensors))
        for name, x in truth[-1].tensors.items():
            check("gathered", same, name, found.get(name), x)
    if first:
        raise Differs(first[0])
    first_of_all = stage is mz.DataParallel and comm.rank == 0
    return facts_of(model, engine.units, comm.size) if first_of_all else set()


# The job.


def meet(mpi: MPI.Comm, patience: float = math.inf) -> bool:
    """Wait for all ranks, asleep: those who compute need the cores. False where they do not come."""
    end, pause = time.monotonic() + patience, 0.0002
    arrived = mpi.Ibarrier()
    while not arrived.Test():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.005)
    return True


def run(spec: Spec, comm: mz.Communicator) -> tuple[list[tuple[str, str]], str, set[str]]:
    """One model on this rank: what differs in which stages, how it failed, facts."""
    facts, differ = set[str](), list[tuple[str, str]]()
    try:
        found = truth_of(spec) if comm.rank == 0 else None
        failed = ""
    except Exception:
        found, failed = None, traceback.format_exc()
    meet(comm.mpi)
    truth, failed = comm.mpi.bcast((found, failed))
    if failed:
        return [], f"the oracle failed: {failed}", facts
    facts.update(truth[1])
    for stage in stages_of(spec):
        try:
            facts |= compare(stage, spec, truth[0], comm)
        except Differs as differs:
            differ.append((stage.__name__, str(differs)))
        except Exception:
            return differ, f"{stage.__name__}: {traceback.format_exc()}", facts
    return differ, "", facts


def verdict(spec: Spec, comm: mz.Communicator) -> dict[str, Any]:
    """On every rank of `comm`."""
    differ, error, facts = run(spec, comm)
    if not meet(comm.mpi, PATIENCE if error else math.inf):
        sys.stderr.write(f"rank {comm.rank}, while others went on: {error}\n")
        sys.stderr.flush()
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)
    everyone = comm.mpi.allgather((differ, error))
    where = gathered([(what, f"{stage} {rank}") for rank, (all_, _) in enumerate(everyone) for stage, what in all_])
    failed = gathered([(error, f"rank {rank}") for rank, (_, error) in enumerate(everyone) if error])
    return {"equal": not where and not failed, "where": where, "error": failed, "facts": sorted(facts)}


def gathered(found: list[tuple[str, str]]) -> str:
    """Lines of (text, place), each text once."""
    places: dict[str, list[str]] = {}
    for text, place in found:
        places.setdefault(text, []).append(place)
    return "".join(f"{text.rstrip()} ({', '.join(where)})\n" for text, where in places.items())


def main() -> None:
    world = mz.Communicator()
    rings = [world.split(int(world.rank >= n)) for n in range(1, world.size + 1)]  # once: they are never freed
    lines = open(sys.argv[1]) if sys.argv[1:] else sys.stdin  # noqa: SIM115
    while True:
        line = lines.readline() if world.rank == 0 else ""
        meet(world.mpi)
        spec = world.mpi.bcast(json.loads(line) if line.strip() else None)
        if spec is None:
            break
        if world.rank < spec["n"]:
            found = verdict(spec, rings[spec["n"] - 1])
            if world.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
