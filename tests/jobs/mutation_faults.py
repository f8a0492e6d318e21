"""Faults that real trainers had, or that a stage may be written with. Each is planted inside a `with` block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import mutation_battery
import numpy as np
from mpi4py import MPI

import minizero as mz
from minizero import engine as engines
from minizero import functional as F
from minizero import nn, ring
from minizero.backend import bfloat16
from minizero.comm import Communicator
from minizero.engine import Engine
from minizero.flat import Unit
from minizero.listener import Listener
from minizero.optim import Optimizer, add, divide

Fault = Callable[[], AbstractContextManager[Any]]
FAULTS: dict[str, Fault] = {}
Patch = tuple[Any, str, Any]  # owner, name, what is put there


def planted(*patches: Patch) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for owner, name, new in patches:
        stack.enter_context(mock.patch.object(owner, name, new))
    return stack


def fault(name: str) -> Callable[[Callable[[], Sequence[Patch]]], Any]:
    """Enter a function that returns patches as the fault `name`."""

    def enter(patches: Callable[[], Sequence[Patch]]) -> Any:
        FAULTS[name] = lambda: planted(*patches())
        return patches

    return enter


def only(stage: type[Engine], method: str, new: Callable[..., Any]) -> Patch:
    """Patch a method of one stage, and not of those that inherit it."""
    old = getattr(stage, method)

    def chosen(engine: Engine, *args: Any) -> Any:
        return (new if type(engine) is stage else old)(engine, *args)

    return stage, method, chosen


def around(owner: Any, method: str, new: Callable[..., Any]) -> Patch:
    """Patch by a function that is given the old method first."""
    old = getattr(owner, method)
    return owner, method, wraps(old)(lambda *args, **options: new(old, *args, **options))


def every_reduce(new: Callable[..., Any]) -> list[Patch]:
    return [around(mz.DataParallel, "reduce", new), around(mz.Zero2, "reduce", new)]


# The mean and the sum.


def divide_in_mean(how: Callable[[Any, float], None]) -> list[Patch]:
    """Replace the one division of the mean, and not that of clipping."""

    def average(old: Any, engine: Engine) -> None:
        with mock.patch.object(engines, "divide", how):
            old(engine)

    return [around(Engine, "_average", average)]


@fault("the mean is never taken")
def _() -> Sequence[Patch]:
    return divide_in_mean(lambda target, count: None)


@fault("the mean is taken twice")
def _() -> Sequence[Patch]:
    def twice(target: Any, count: float) -> None:
        divide(target, count)
        divide(target, count)

    return divide_in_mean(twice)


def ranks() -> int:
    return MPI.COMM_WORLD.size


@fault("the mean over ranks is taken before the sum")
def _() -> Sequence[Patch]:
    def before(old: Any, engine: Engine, unit: Unit, gradient: Any) -> Any:
        divide(gradient, ranks())
        return old(engine, unit, gradient)

    return [*every_reduce(before), *divide_in_mean(lambda target, count: divide(target, count / ranks()))]


@fault("weights are averaged, not gradients")
def _() -> Sequence[Patch]:
    def publish(engine: Engine, unit: Unit) -> None:
        divide(ring.all_reduce(engine.comm, unit.weights), ranks())

    def mean(old: Any, engine: Engine) -> None:
        how = (lambda target, count: divide(target, count / ranks())) if type(engine) is mz.DataParallel else divide
        with mock.patch.object(engines, "divide", how):
            old(engine)

    return [
        only(mz.DataParallel, "reduce", lambda engine, unit, gradient: gradient),
        only(mz.DataParallel, "publish", publish),
        around(Engine, "_average", mean),
    ]


@fault("gradients are never reduced in ZeRO-3")
def _() -> Sequence[Patch]:
    return [(mz.Zero3, "reduce", lambda engine, unit, gradient: unit.own(gradient).copy())]


@fault("every rank reads the slice of rank 0")
def _() -> Sequence[Patch]:
    return [(mutation_battery, "data_rank", lambda comm: 0)]


@fault("only the last micro-batch counts")
def _() -> Sequence[Patch]:
    def keep(unit: Unit, summed: Any) -> None:
        unit.gradient = summed

    return [(Unit, "keep", keep)]


@fault("uneven slices weigh the same")
def _() -> Sequence[Patch]:
    return [around(Engine, "backward", lambda old, engine, loss, examples=None: old(engine, loss))]


@fault("what was reduced is also kept and counted again")
def _() -> Sequence[Patch]:
    stash: dict[Unit, Any] = {}

    def take(old: Any, unit: Unit) -> Any:
        vector = old(unit)
        if unit in stash:
            add(vector, stash[unit])
        stash[unit] = vector.copy()
        return vector

    def drop(old: Any, unit: Unit) -> None:
        old(unit)
        stash.pop(unit, None)

    return [around(Unit, "take_local", take), around(Unit, "drop_gradients", drop)]


@fault("a shared weight's gradient is counted twice")
def _() -> Sequence[Patch]:
    def collect(old: Any, unit: Unit, parameter: nn.Parameter, gradient: Any) -> None:
        old(unit, parameter, gradient * 2 if parameter.name == "token.weight" else gradient)

    return [around(Unit, "collect", collect)]


@fault("an unused layer's gradient is whatever memory held")
def _() -> Sequence[Patch]:
    def take(old: Any, unit: Unit) -> Any:
        missing = [span for parameter, span in unit.spans.items() if parameter not in unit._filled]
        vector = old(unit)
        for span in missing:
            vector[span] = 1
        return vector

    return [around(Unit, "take_local", take)]


# In name only.


@fault("ZeRO-1 in name only: whole state, and an all-gather for show")
def _() -> Sequence[Patch]:
    return [only(mz.Zero1, "mine", lambda engine, unit, vector: vector)]


@fault("ZeRO-2 all-reduces, then slices")
def _() -> Sequence[Patch]:
    def reduce(engine: Engine, unit: Unit, gradient: Any) -> Any:
        return unit.own(ring.all_reduce(engine.comm, gradient)).copy()

    return [only(mz.Zero2, "reduce", reduce)]


@fault("ZeRO-2 all-reduces, and keeps it all")
def _() -> Sequence[Patch]:
    return [only(mz.Zero2, "reduce", lambda engine, unit, gradient: ring.all_reduce(engine.comm, gradient))]


@fault("ZeRO-3 in name only: it is ZeRO-2")
def _() -> Sequence[Patch]:
    return [(mz.Zero3, word, getattr(mz.Zero2, word)) for word in ("place", "gather", "release", "publish")]


@fault("reduce-scatter hands out a view")
def _() -> Sequence[Patch]:
    return [(mz.Zero2, "reduce", lambda engine, unit, gradient: ring.reduce_scatter(engine.comm, gradient))]


@fault("updated weights are not published")
def _() -> Sequence[Patch]:
    return [(mz.Zero1, "publish", lambda engine, unit: None)]


# What lives too long.


@fault("units stay gathered from forward to backward")
def _() -> Sequence[Patch]:
    busy: set[Engine] = set()

    def backward(old: Any, engine: Engine, *args: Any, **options: Any) -> None:
        busy.add(engine)
        old(engine, *args, **options)
        busy.remove(engine)
        for unit in engine.units:
            if type(engine) is mz.Zero3:
                unit.unbind()

    def release(old: Any, engine: Engine, unit: Unit) -> None:
        if engine in busy:
            old(engine, unit)

    return [around(Engine, "backward", backward), around(mz.Zero3, "release", release)]


@fault("units stay gathered for good")
def _() -> Sequence[Patch]:
    return [(mz.Zero3, "release", lambda engine, unit: None)]


def keeping(kept: Callable[[Any], Any]) -> list[Patch]:
    """A `linear` whose closure keeps something of its weight."""

    def linear(old: Any, x: Any, weight: Any, bias: Any = None) -> mz.Tensor:
        result: mz.Tensor = old(x, weight, bias)
        if result.node is not None:
            plain, saved = result.node.backward, kept(weight)
            result.node.backward = lambda gradient: plain(gradient) if plain and saved is not None else ()
        return result

    return [around(F, "linear", linear)]


@fault("a closure keeps a view of a weight")
def _() -> Sequence[Patch]:
    return keeping(lambda weight: weight.data.T)


@fault("a closure keeps a bfloat16 weight as float32")
def _() -> Sequence[Patch]:
    return keeping(lambda weight: weight.data.astype(np.float32))


@fault("units are reduced first to last")
def _() -> Sequence[Patch]:
    def reduce_finished(listener: Listener) -> None:
        engine = listener.engine
        while listener.todo and not listener.pending.get(listener.todo[0]):
            unit = listener.todo.pop(0)
            with engine._on(unit):
                unit.keep(engine.reduce(unit, unit.take_local()))

    return [(Listener, "reduce_finished", reduce_finished)]


# The ring and the chunks. Broadcasts at the start add unsigned integers; they are left as they are.


def floating(vector: Any) -> bool:
    return vector.dtype.kind != "u"


def turned_ring(first: int, last: int, backwards: bool = False, wrong: int = 0) -> Callable[..., Any]:
    """A reduce-scatter that sends chunk rank + `first` first, each next one after it, and returns rank + `last`."""

    def reduce_scatter(old: Any, comm: Communicator, vector: Any) -> Any:
        if not floating(vector):
            return old(comm, vector)
        chunk, turn = ring.chunks(vector, comm.size), 1 if backwards else -1
        arriving = comm.scratch(chunk[0].size, vector.dtype)
        neighbours = comm.left, comm.right
        if backwards:
            comm.right, comm.left = neighbours
        with comm.label("reduce_scatter"):
            for step in range(comm.size - 1):
                sent = comm.rank + first + turn * step
                comm.exchange(chunk[sent % comm.size], arriving)
                add(chunk[(sent + turn + wrong) % comm.size], arriving)
        comm.left, comm.right = neighbours
        return chunk[(comm.rank + last) % comm.size]

    return reduce_scatter


def shifted_all_gather(old: Any, comm: Communicator, vector: Any) -> Any:
    """Rank r gives chunk r + 1."""
    if not floating(vector) or comm._operation == "control":
        return old(comm, vector)
    chunk = ring.chunks(vector, comm.size)
    with comm.label("all_gather"):
        for step in range(comm.size - 1):
            sent = comm.rank + 1 - step
            comm.exchange(chunk[sent % comm.size], chunk[(sent - 1) % comm.size])
    return vector


@fault("the ring adds to the wrong chunk")
def _() -> Sequence[Patch]:
    return [around(ring, "reduce_scatter", turned_ring(-1, 0, wrong=1))]


@fault("the ring runs the other way")
def _() -> Sequence[Patch]:
    return [around(ring, "reduce_scatter", turned_ring(1, 0, backwards=True))]


@fault("rank r owns chunk r + 1, in ring and units")
def _() -> Sequence[Patch]:
    def make(old: Any, unit: Unit, index: int, name: str, module: Any, parameters: Any, rank: int, n: int) -> None:
        old(unit, index, name, module, parameters, (rank + 1) % n, n)

    return [
        around(ring, "reduce_scatter", turned_ring(0, 1)),
        around(ring, "all_gather", shifted_all_gather),
        around(Unit, "__init__", make),
    ]


@fault("ZeRO-1 updates chunk r + 1, consistently")
def _() -> Sequence[Patch]:
    def mine(engine: Engine, unit: Unit, vector: Any) -> Any:
        length = unit.length // engine.comm.size
        first = (engine.comm.rank + 1) % engine.comm.size * length
        return vector[first : first + length] if vector.size == unit.length else vector

    def shifted(old: Any, engine: Engine, *args: Any) -> Any:
        with ExitStack() as stack:
            if type(engine) is mz.Zero1:
                stack.enter_context(planted(around(ring, "all_gather", shifted_all_gather)))
            return old(engine, *args)

    return [
        only(mz.Zero1, "mine", mine),
        around(mz.Zero1, "publish", shifted),
        around(Engine, "gather_optimizer_state", shifted),
    ]


@fault("all units are reduced as one vector")
def _() -> Sequence[Patch]:
    def reduce_finished(old: Any, listener: Listener) -> None:
        engine = listener.engine
        if type(engine) is not mz.DataParallel:
            old(listener)
        elif listener.todo and not any(listener.pending.values()):
            units, listener.todo = listener.todo, []
            fused = ring.all_reduce(engine.comm, np.concatenate([unit.take_local() for unit in units]))
            ends = np.cumsum([unit.length for unit in units])[:-1]
            for unit, part in zip(units, np.split(fused, ends), strict=True):
                unit.keep(part.copy())

    return [around(Listener, "reduce_finished", reduce_finished)]


@fault("bfloat16 sums travel as float32")
def _() -> Sequence[Patch]:
    def reduce_scatter(old: Any, comm: Communicator, vector: Any) -> Any:
        if vector.dtype != bfloat16:
            return old(comm, vector)
        own = ring.chunks(vector, comm.size)[comm.rank]
        own[:] = old(comm, vector.astype(np.float32))
        return own

    return [around(ring, "reduce_scatter", reduce_scatter)]


@fault("bfloat16 gradients are held as float32")
def _() -> Sequence[Patch]:
    def keep(old: Any, unit: Unit, summed: Any) -> None:
        old(unit, summed.astype(np.float32) if summed.dtype == bfloat16 else summed)

    return [around(Unit, "keep", keep)]


@fault("ranks start from their own seeds")
def _() -> Sequence[Patch]:
    return [(ring, "broadcast", lambda comm, vector: vector)]


@fault("all ranks have the same noise")
def _() -> Sequence[Patch]:
    return [around(engines, "Noise", lambda old, seed, rank: old(seed, 0))]


# Norms and padding.


def padding_of_ones(old: Any, unit: Unit) -> Any:
    vector = old(unit)
    vector[unit.size :] = 1  # memory from `empty` may hold anything
    return vector


@fault("padding is not zeroed")
def _() -> Sequence[Patch]:
    return [around(Unit, "take_local", padding_of_ones)]


@fault("padding counts in the norm")
def _() -> Sequence[Patch]:
    def own_parts(old: Any, unit: Unit) -> list[Any]:
        parts: list[Any] = old(unit)
        if parts:
            own, last = unit.own(unit.gradient), list(unit.spans.values())[-1]
            parts[-1] = own[max(last.start - unit.chunk.start, 0) :]
        return parts

    def step(old: Any, engine: Engine) -> None:
        for unit in engine.units:  # the update does not see it
            if unit.gradient is not None:
                unit.own(unit.gradient)[max(unit.size - unit.chunk.start, 0) :] = 0
                if unit.gradient.size == unit.length:
                    unit.gradient[unit.size :] = 0
        old(engine)

    return [
        around(Unit, "take_local", padding_of_ones),
        around(Unit, "own_parts", own_parts),
        around(Engine, "step", step),
    ]


def squares(vector: Any) -> float:
    return float((vector.astype(np.float64) ** 2).sum())


@fault("the norm is taken before gradients are reduced")
def _() -> Sequence[Patch]:
    local: dict[Engine, float] = {}

    def reduce(old: Any, engine: Engine, unit: Unit, gradient: Any) -> Any:
        local[engine] = local.get(engine, 0.0) + squares(gradient) / ranks() ** 2
        return old(engine, unit, gradient)

    def square_sums(old: Any, engine: Engine) -> Any:
        table = old(engine)
        table[:] = 0
        table[:, 0] = engine.comm.mpi.allgather(local.pop(engine))
        return table

    return [*every_reduce(reduce), around(Engine, "_square_sums", square_sums)]


@fault("the norm is that of the own chunk")
def _() -> Sequence[Patch]:
    def square_sums(old: Any, engine: Engine) -> Any:
        table = old(engine)
        table[np.arange(engine.comm.size) != engine.comm.rank] = 0
        return table

    return [around(Engine, "_square_sums", square_sums)]


@fault("each rank clips by the norm of its own chunk, and asks nobody")
def _() -> Sequence[Patch]:
    def clip(engine: Engine, max_norm: float) -> float:
        engine._average()
        norm = math.sqrt(sum(squares(unit.own(unit.gradient)) for unit in engine.units if unit.trainable))
        for unit in engine.units:
            if unit.trainable and norm > max_norm:
                divide(unit.gradient, norm / max_norm)
        return norm

    return [(Engine, "clip_grad_norm", clip)]


@fault("the norm adds up what all ranks hold, copies included")
def _() -> Sequence[Patch]:
    def own_parts(old: Any, unit: Unit) -> list[Any]:
        if not unit.trainable or unit.gradient is None or unit.gradient.size != unit.length:
            return old(unit)
        return [unit.gradient[span] for span in unit.spans.values()]

    return [around(Unit, "own_parts", own_parts)]


# The update.


@fault("moments start anew in every step")
def _() -> Sequence[Patch]:
    def step(old: Any, engine: Engine) -> None:
        for unit in engine.units:
            unit.state = None
        old(engine)

    return [around(Engine, "step", step)]


@fault("bias correction is always that of step 1")
def _() -> Sequence[Patch]:
    return [around(Optimizer, "update", lambda old, optimizer, step, *rest: old(optimizer, 1, *rest))]


@fault("bias correction counts units as steps")
def _() -> Sequence[Patch]:
    counts: dict[Optimizer, int] = {}

    def update(old: Any, optimizer: Optimizer, step: int, *rest: Any) -> None:
        counts[optimizer] = counts.get(optimizer, 0) + 1
        old(optimizer, counts[optimizer], *rest)

    return [around(Optimizer, "update", update)]


@fault("frozen weights decay")
def _() -> Sequence[Patch]:
    def step(old: Any, engine: Engine) -> None:
        old(engine)
        for unit in engine.units:
            if not unit.trainable:
                unit.weights *= 0.99

    return [around(Engine, "step", step)]


@fault("frozen weights are trained")
def _() -> Sequence[Patch]:
    def make(old: Any, engine: Engine, model: nn.Module, *rest: Any) -> None:
        for parameter in model.parameters():
            parameter.requires_grad = True
        old(engine, model, *rest)

    return [around(Engine, "__init__", make)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


FAULTS["none"] = nothing
