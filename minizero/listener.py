"""When is a unit gathered, reduced and let go of while backward goes?

    backward runs          head   block 1   block 0         A unit whose weights are not here is gathered when the
    gathered (ZeRO-3)      ====   =======   =======         first node that needs one of them is about to run, and
    reduced                    |         |         |        released when all its parameters have finished.

The order of reduction is fixed: the last unit first, and none before it has finished. It never depends on which
parameters a rank's forward used, or the ranks would wait for each other in different units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import autograd
from .autograd import Tensor
from .backend import Array
from .flat import Unit

if TYPE_CHECKING:
    from .engine import Engine


class Listener(autograd.Watcher):
    """Hears of parameters as one backward goes, for one engine. Frozen ones of other models may take part.

    Attributes:
        todo: trained units that are not reduced yet; the last one comes next.
        pending: how many of a unit's parameters backward has reached, and not finished.
        gathered: units that were made whole for this backward.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.todo = [unit for unit in engine.units if unit.trainable]
        self.pending: dict[Unit, int] = {}
        self.gathered: set[Unit] = set()
        for unit in self.todo:
            unit.collecting = True

    def reached(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            unit = self.engine._unit_of.get(parameter)
            if unit is not None:
                self.pending[unit] = self.pending.get(unit, 0) + 1
            elif parameter.requires_grad:
                raise RuntimeError(f"backward came across {parameter!r}, which is not part of the wrapped model: "
                                   "keep all modules in its attributes, lists or dicts, before wrapping")  # fmt: skip
        self.reduce_finished()

    def needed(self, parameter: Tensor) -> None:
        unit = self.engine._unit_of.get(parameter)
        if unit is not None and not unit.whole:
            self.gathered.add(unit)
            with self.engine._on(unit):
                self.engine.gather(unit)

    def ran(self) -> None:
        self.reduce_finished()

    def finished(self, leaf: Tensor, gradient: Array | None) -> None:
        unit = self.engine._unit_of.get(leaf)
        if unit is None:
            super().finished(leaf, gradient)
            return
        if gradient is not None:
            unit.collect(leaf, gradient)  # type: ignore[arg-type]  # a unit's leaves are Parameters
        self.pending[unit] -= 1
        if not self.pending[unit] and unit in self.gathered:
            self.gathered.remove(unit)
            self.engine.release(unit)

    def reduce_finished(self) -> None:
        """Reduce each unit whose turn has come."""
        while self.todo and not self.pending.get(self.todo[-1]):
            unit = self.todo.pop()
            if self.engine._syncing:
                with self.engine._on(unit):
                    kept = self.engine.reduce(unit, unit.take_local())
                if kept is None:
                    stage = type(self.engine).__name__
                    raise TypeError(f"{stage}.reduce returned nothing for {unit.name}: return what to keep")
                unit.keep(kept)

    def close(self) -> None:
        """Backward is over, or has failed: leave nothing whole that was not before."""
        for unit in self.engine.units:
            unit.collecting = False
        while self.gathered:
            self.engine.release(self.gathered.pop())
