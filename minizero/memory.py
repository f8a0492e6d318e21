"""How many bytes does a rank hold, when, and what for? And what happens at the end of them?

    with memory.measure(engine) as seen:            around training code as it is
        loss = F.cross_entropy(engine(x), y); engine.backward(loss); engine.step()
    seen.peaks["backward"]                          {"weights": bytes, "gradients": ..., ...} at the largest moment

    with memory.budget("40 MB"):                    this rank is now a device of 40 MB
        ...                                         OutOfMemory leaves the block where an allocation does not fit

Both ask the allocator, so nothing can hide. What an array is for follows from who asked for it:

    weights, gradients, optimizer     the arrays that an engine holds
    activations                       what operations of the forward allocate and keep for the backward
    temporary                         gathered units, gradients in passing, casts, scratch of ring and optimizer
    other                             all the rest, such as the user's own batch
"""

from __future__ import annotations

import gc
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from . import allocator, optim, plan
from .autograd import Node, Tensor, backward, nodes_behind
from .backend import Array
from .comm import MPI, Communicator
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import OutOfMemory as OutOfMemory
from .diagnosis import diagnose as diagnose
from .engine import Engine
from .flat import Unit
from .job import abort
from .parameter import Parameter
from .source import HERE, OPERATIONS, term_of

TERMS = ("weights", "gradients", "optimizer", "activations", "temporary", "other")
SMALL = 512  # bytes, the grain of a GPU's pool: smaller arrays (a number in an expression) are never refused
PATIENCE = 8.0  # seconds that a rank which is out of memory waits for the others to be, too
WORLD_FULL = 32_765  # the tag, on MPI.COMM_WORLD, of a message that says so
Terms = dict[str, int]

# What runs decides the phase; the innermost of these functions counts.
PHASES = {
    Engine.__init__.__code__: "building",
    Engine.__call__.__code__: "forward",
    Engine.backward.__code__: "backward",
    backward.__code__: "backward",
    Engine.step.__code__: "step",
    Engine.clip_grad_norm.__code__: "step",
}


class Meter:
    """Live bytes by term, while it is on.

    Of arrays that are older than it, those of `engines` count; where none are named, those of all engines that exist,
    or of none if `existing` is False. Those that are built inside count, too. Inside another one it counts the same.
    """

    def __init__(self, engines: Iterable[Engine], existing: bool) -> None:
        self.watch, self.existing = allocator.watch(), existing
        if existing and not engines:
            gc.collect()  # an engine and its hooks refer to each other, and wait for this when nobody else does
        exist = {thing for thing in gc.get_objects() if issubclass(type(thing), Engine)}
        self.engines = weakref.WeakSet(engines or (exist if existing else ()))
        self.ignored = weakref.WeakSet(exist.difference(self.engines))
        if self.watch.listeners:
            self.ignored |= self.watch.ignored
            self.engines -= self.watch.ignored
        self.engine: Callable[[], Engine | None] = lambda: None  # the one that was at work last
        self.activations = 0
        self._last = ""

    def __enter__(self) -> Any:
        if not self.watch.listeners:
            arrays = [array for engine in self.engines for array in _arrays(engine)]
            others = {id(each) for engine in self.ignored for each in _with_scratch(engine)}
            others -= {id(each) for engine in self.engines for each in _with_scratch(engine)}
            for thing in gc.get_objects() if self.engines or self.existing else ():  # scratch is used by whoever comes
                if id(thing) in others:
                    continue
                if issubclass(type(thing), Communicator):
                    arrays.append(thing._scratch)
                elif issubclass(type(thing), optim.Scratch):
                    arrays.extend(thing.arrays.values())
            for array in arrays:
                self.watch.count(_owner(array))
            self.watch.ignored = self.ignored
        self.watch.listen(self.asked)
        return self

    def __exit__(self, *_: Any) -> None:
        self.watch.leave(self.asked)

    def asked(self, size: int, frame: FrameType | None) -> bool:
        """Called before each allocation; False refuses it."""
        raise NotImplementedError

    def full(self, size: int, frame: FrameType | None) -> None:
        """Called where the allocator itself refuses an allocation."""

    def live(self) -> int:
        """Bytes of all arrays that count."""
        return self.watch.live() + self.watch.older_bytes

    def terms(self, size: int = 0, frame: FrameType | None = None) -> Terms:
        """Live bytes by term, as if `frame` already had the `size` bytes that it asks for."""
        found = dict.fromkeys((*TERMS, "vector"), 0)
        for block in self.watch.blocks():
            found[term_of(block.stack)] += block.size
        if size:
            found[term_of(allocator.stack(frame))] += size
        older = {key: array.nbytes for key, ref in self.watch.older.items() if (array := ref()) is not None}
        for engine in self.engines:
            for unit in getattr(engine, "units", []):
                found["optimizer"] += sum(older.pop(id(_owner(s)), 0) for s in (unit.state or {}).values())
                for term, array in (("weights", unit.weights), ("gradients", _gradient(engine, unit))):
                    size = 0 if array is None else array.nbytes
                    found[term] += size
                    found["vector"] -= size
        found["temporary"] += found.pop("vector") + sum(older.values())  # what no engine keeps is passing
        return found

    def look(self, frame: FrameType | None) -> str:
        """What the code that asks is part of: one of plan.PHASES, or "outside". Notes what is new."""
        phase = self._phase(frame)
        if phase == "backward" and self._last != "backward":
            self.activations = max(self.activations, self.terms()["activations"])
        self._last = phase
        return phase

    def _phase(self, frame: FrameType | None) -> str:
        operation = False
        while frame is not None:
            found = PHASES.get(frame.f_code, "")
            if found and frame.f_code is not backward.__code__ and frame.f_locals["self"] not in self.ignored:
                self.engine = weakref.ref(frame.f_locals["self"])
                self.engines.add(frame.f_locals["self"])
            if found:
                return found
            file = frame.f_code.co_filename  # of autograd.py, backward is above, and loss.item() is in no phase
            operation = operation or (file in OPERATIONS and file != backward.__code__.co_filename)
            frame = frame.f_back
        return "forward" if operation else "outside"


class measure(Meter):  # noqa: N801  (used as a function: with measure() as seen)
    """Note the largest moment of each phase, in bytes by term, of the code inside. It costs nothing elsewhere.

    Args:
        engines, existing: those built before whose arrays count; where none are named, all that exist, or none.
        timeline: also note every allocation, in `events`.

    Attributes:
        peaks: for each phase that occurred ("building", "forward", "backward", "step", "outside"), its terms.
        activations: bytes that the forward had left when the backward began, the most of all steps.
        events: (phase, terms) at each allocation, if wanted.
    """

    def __init__(self, *engines: Engine, existing: bool = True, timeline: bool = False) -> None:
        super().__init__(engines, existing)
        self.peaks: dict[str, Terms] = {}
        self.events: list[tuple[str, Terms]] = []
        self._timeline = timeline
        self._highest: dict[str, int] = {}

    @property
    def peak(self) -> Terms:
        """The largest of the phases, never a sum of them."""
        return max(self.peaks.values(), key=lambda terms: sum(terms.values()), default=dict.fromkeys(TERMS, 0))

    def asked(self, size: int, frame: FrameType | None) -> bool:
        phase, total = self.look(frame), self.live() + size
        if total > self._highest.get(phase, 0):
            self._highest[phase], self.peaks[phase] = total, self.terms(size, frame)
        if self._timeline:
            self.events.append((phase, self.terms(size, frame)))
        return True


class budget(Meter):  # noqa: N801
    """Inside, this rank has so much memory: the allocation that crosses the line is refused, and OutOfMemory leaves
    the block. Arrays count, Python's objects don't.

    Where all ranks of the engine at work fail alike, each raises, and the engine can go on (with a smaller batch,
    say; call zero_grad first). Where only some fail, the job ends, with one report. On a GPU the pool has the limit.

    Args:
        limit: "40 MB" (10^6), "40 MiB" (2^20), or a number of bytes.
        engines, existing: those built before whose arrays count; where none are named, all that exist, or none.

    Attributes:
        highest: the most bytes that were held so far.
    """

    def __init__(self, limit: str | int, *engines: Engine, existing: bool = True) -> None:
        super().__init__(engines, existing)
        self.limit = plan.parse_bytes(limit) if isinstance(limit, str) else limit
        if not isinstance(self.limit, int) or self.limit < 1:
            raise ValueError(f"budget: write a limit as '40 MB', or as a whole number of bytes, not {limit!r}")
        self.refused: OutOfMemory | None = None
        self.highest = 0
        self._engine: Engine | None = None

    def __enter__(self) -> Any:
        super().__enter__()
        self.refused = None
        self._pool_refuses = self.watch.limit(self.limit)
        return self

    def asked(self, size: int, frame: FrameType | None) -> bool:
        self.look(frame)
        wanted = self.live() + size
        if size < SMALL or wanted <= self.limit or self._pool_refuses:
            self.highest = max(self.highest, min(wanted, self.limit))
            return True
        self.full(size, frame)
        return False

    def full(self, size: int, frame: FrameType | None) -> None:
        """Note what was held, and what for, when an allocation was refused."""
        phase, held, term = self._last, self.terms(), term_of(allocator.stack(frame))
        self._engine, unit = self.engine(), unit_of(frame)
        if term == "vector":
            later = self.terms(size, frame)
            term = next((t for t in TERMS if later[t] > held[t]), "temporary")
            if phase == "building":
                term = "weights"
        left = self.activations
        run = len({*reached(frame), unit} - {None}) if phase == "forward" else 0
        self.refused = OutOfMemory(self.limit, size, held, term, phase, unit, self._engine, left, run)
        rows = self._engine._tally.rows if self._engine is not None else []
        self.refused.rows = rows[-1] if rows else 0

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.watch.limit(0)
        super().__exit__()
        mine = type(error) is not MemoryError or not error.args or "allocate" in str(error)  # not somebody's own
        if self.refused is None or not isinstance(error, MemoryError) or not mine:
            return
        traceback.clear_frames(trace)  # they keep activations alive
        error.__traceback__ = None
        if self._engine is not None:
            agree(self._engine.comm, self.refused)
        raise self.refused from None


def unit_of(frame: FrameType | None) -> Unit | None:
    """The unit that a frame works for."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(HERE):
            for key in ("unit", "self", "weight", "node"):
                if unit := _unit(frame.f_locals.get(key)):
                    return unit
        frame = frame.f_back
    return None


def reached(frame: FrameType | None) -> set[Unit | None]:
    """The units that a forward has come through, by the graph behind the operation that asks."""
    while frame is not None:
        tensors = [
            value for value in frame.f_locals.values() if isinstance(value, Tensor) and getattr(value, "node", None)
        ]
        if tensors:
            return {_unit(node) for tensor in tensors if tensor.node for node in nodes_behind(tensor.node)}
        frame = frame.f_back
    return set()


def agree(comm: Communicator, error: OutOfMemory) -> None:
    """Return where all ranks of `comm` are out of memory. Where only some are, end the job with one report."""
    world, others = MPI.COMM_WORLD, {number for number in comm._job if number != MPI.COMM_WORLD.rank}
    said = [world.Isend([b"", MPI.BYTE], rank, WORLD_FULL) for rank in others]
    heard: set[int] = set()
    end = time.monotonic() + PATIENCE
    while heard != others and time.monotonic() < end:
        for rank in others - heard:
            if world.Iprobe(rank, WORLD_FULL):
                world.Recv([bytearray(0), MPI.BYTE], rank, WORLD_FULL)
                heard.add(rank)
        time.sleep(0.001)
    if heard == others:
        MPI.Request.Waitall(said)
        return
    if world.rank == min(heard | {world.rank}):
        full = sorted(heard | {world.rank})
        error.args = (f"{error}. Only ranks {full} ran out of memory within {PATIENCE:g} s: the job ends",)
        abort(OutOfMemory, error, None)
    time.sleep(2 * PATIENCE)  # until the one that reports has ended the job


def _unit(value: Any) -> Unit | None:
    """The unit that a thing in a frame belongs to, if any."""
    if isinstance(value, Unit):
        return value
    if isinstance(value, Node):
        return next((unit for unit in map(_unit, value.parameters) if unit), None)
    return value.unit if isinstance(value, Parameter) else None


def _owner(array: Array) -> Array:
    """The array whose memory this one is a view of."""
    while array.base is not None and isinstance(array.base, type(array)):
        array = array.base
    return array


def _gradient(engine: Engine, unit: Unit) -> Array | None:
    """What the engine keeps of a unit's gradient; its own whole one only where it waits for others of its kind."""
    return unit.gradient if engine._syncing or unit.local is None else unit.local


def _with_scratch(engine: Engine) -> list[Any]:
    """What an engine uses that keeps scratch; it may have failed while it was built."""
    return [getattr(engine, "comm", None), getattr(getattr(engine, "optimizer", None), "_scratch", None)]


def _arrays(engine: Engine) -> Iterator[Array]:
    """All arrays that an engine keeps for its units."""
    for unit in engine.units:
        yield from (array for array in (unit.weights, unit.gradient, unit.local, unit._vector) if array is not None)
        yield from (unit.state or {}).values()
