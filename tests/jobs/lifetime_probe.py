"""What is alive? Two independent witnesses: weak references to vectors, and tracemalloc's list of NumPy's buffers."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import minizero as mz
from minizero import optim
from minizero.flat import Unit

NUMPY = np.lib.tracemalloc_domain


def buffers() -> list[int]:
    """Bytes of each NumPy buffer that was allocated since `tracemalloc.start()` and is alive."""
    traces: Any = tracemalloc.take_snapshot().traces
    return [size for domain, size, *_ in traces._traces if domain == NUMPY]  # 20 times as fast as objects of them


def live() -> int:
    """Their sum. Views count nothing, but keep the whole buffer that they look into."""
    return sum(buffers())


def of_size(*nbytes: int) -> int:
    """How many of them have exactly one of these sizes."""
    return sum(size in nbytes for size in buffers())


def traced() -> int:
    """Bytes of everything, Python's objects included."""
    return tracemalloc.get_traced_memory()[0]


def peak(work: Callable[[], Any]) -> int:
    """Bytes, Python's objects included, that `work` needs at its worst moment, beyond what is alive before it."""
    tracemalloc.reset_peak()
    before = traced()
    work()
    return tracemalloc.get_traced_memory()[1] - before


def spare(engine: mz.Engine) -> int:
    """Bytes of scratch that is used again and again, and belongs to no term."""
    arrays = [*engine.optimizer._scratch.arrays.values(), *optim._shared.arrays.values(), engine.comm._scratch]
    return sum(array.nbytes for array in arrays)


def drop_spare(comm: mz.Communicator) -> None:
    """Let go of what all engines share of it, so that it is counted where it comes back."""
    optim._shared.arrays.clear()
    comm._scratch = comm._scratch[:0].copy()


class Watch:
    """Weak references to every whole vector that units make: gathered weights and local gradients."""

    def __init__(self) -> None:
        self.made: list[tuple[Unit, weakref.ref[Any]]] = []

    def alive(self) -> list[str]:
        """The units whose vectors are alive, by name."""
        return [unit.name for unit, vector in self.made if vector() is not None]

    def loose(self) -> list[str]:
        """Those that are alive and not what the unit's parameters are views of: gradients, or forgotten weights."""
        return [unit.name for unit, ref in self.made if (vector := ref()) is not None and vector is not unit._vector]


@contextmanager
def watched() -> Iterator[Watch]:
    """Inside, whole vectors are watched from their birth."""
    watch, blank = Watch(), Unit.blank

    def watched_blank(unit: Unit) -> Any:
        vector = blank(unit)
        watch.made.append((unit, weakref.ref(vector)))
        return vector

    Unit.blank = watched_blank  # type: ignore[assignment,method-assign]
    try:
        yield watch
    finally:
        Unit.blank = blank  # type: ignore[method-assign]


@contextmanager
def before_each(owner: Any, name: str, look: Callable[..., Any]) -> Iterator[None]:
    """Inside, `look()` runs before each call of the method `name` of `owner`, an object or a class."""
    method = getattr(owner, name)

    def looked(*args: Any, **options: Any) -> Any:
        look()
        return method(*args, **options)

    own = name in vars(owner)
    setattr(owner, name, looked)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
