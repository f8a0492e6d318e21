"""What is the same in every stage? The plumbing of the training loop.

    loss = F.cross_entropy(engine(x), y)      forward: each unit is whole while its module runs
    engine.backward(loss)                     backward: units are reduced as they finish, the last one first
    engine.step()                             the mean, a look for bad numbers, the update, publishing

A stage is a subclass that says, in six words, what it does differently:

    place(unit)             what stays here after wrapping
    gather(unit)            make the unit whole, now
    release(unit)           stop holding it whole
    reduce(unit, gradient)  fresh local gradient in; what this rank keeps of the sum out
    mine(unit, vector)      the elements that this rank updates, and keeps moments for
    publish(unit)           after the update: tell the others

All stages reduce the same vectors in the same order along the same ring, divide once, and update element by
element. That is why they have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import autograd, checkpoint, ring
from .agreement import Tally, compare_models, norm_of, refuse_bad_numbers, shares, square_sums
from .autograd import Tensor
from .backend import Array, to_host, xp
from .comm import MPI, Communicator
from .flat import Unit, units_of
from .listener import Listener
from .nn import Module, Noise
from .optim import Optimizer, all_finite, divide


class Engine:
    """A model, an optimizer and the ranks that train it together.

    Collective: every rank wraps the same model. Rank 0's values become everybody's; the model is changed in place.

    Args:
        model: an `nn.Module` that no other engine has wrapped.
        optimizer: `SGD` or `Adam`; it keeps no state of its own and may serve several engines.
        comm: the data-parallel group; all ranks where it is left out. An mpi4py communicator is taken, too.

    Attributes:
        units: the model's units, in order of use. steps: how many steps were made.
    """

    def __init__(self, model: Module, optimizer: Optimizer, comm: Communicator | MPI.Comm | None = None) -> None:
        if not isinstance(model, Module) or not isinstance(optimizer, Optimizer):
            given = f"{type(model).__name__} and {type(optimizer).__name__}"
            raise TypeError(f"{type(self).__name__}(model, optimizer) needs an nn.Module and SGD or Adam, not {given}")
        if any(module.around is not None for _, module in model.named_modules()):
            raise ValueError("this model, or a part of it, is already wrapped by an engine: make a new model")
        self.model, self.optimizer = model, optimizer
        self.comm = comm if isinstance(comm, Communicator) else Communicator(comm)
        self.steps = 0
        self._micro_batch = 0
        self._syncing = True
        self._forget()

        model.name_parameters()
        self.units = units_of(model, self.comm.rank, self.comm.size)
        self._trained = [unit for unit in self.units if unit.trainable]
        self._names = [unit.name for unit in self.units]
        compare_models(self)
        self._unit_of: dict[Tensor, Unit] = {p: unit for unit in self.units for p in unit.parameters}
        for unit in self.units:
            with self._on(unit):
                unit.weights = ring.broadcast(self.comm, unit.materialise(model.seed))
                self.place(unit)

        self.noise = Noise(model.seed, self.comm.rank)
        for _, module in model.named_modules():
            units = [unit for unit in self.units if unit.module is module]
            if units:
                module.around = partial(self._whole, units)
            if hasattr(module, "noise"):
                module.noise = self.noise

    # The six words. The first three do nothing unless a stage says so.

    def place(self, unit: Unit) -> None:
        """What stays here after wrapping: everything."""

    def gather(self, unit: Unit) -> None:
        """Make the unit whole, now. Called only where it is not."""

    def release(self, unit: Unit) -> None:
        """Stop holding the unit whole. Called only after `gather`."""

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        """Take this rank's whole gradient (unit.length,); return what it keeps of the sum over ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to reduce a unit")

    def mine(self, unit: Unit, vector: Array) -> Array:
        """The elements of a vector that this rank updates, and keeps moments for, as a view."""
        raise NotImplementedError(f"{type(self).__name__} does not say which elements are mine")

    def publish(self, unit: Unit) -> None:
        """After the update: tell the others."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to publish")

    # The training loop.

    def __call__(self, *inputs: Any) -> Tensor:
        """The model's forward. Under ZeRO-3 collective: every rank must run the same units in the same order."""
        rows, call = self._tally.rows, self.noise.call
        if autograd.recording():
            self._tally.rows = [*rows, math.prod(getattr(inputs[0], "shape", ())[:1]) if inputs else 1]
        try:
            return self.model(*inputs)
        except BaseException:  # as if it had not been: what is drawn next does not depend on it
            self._tally.rows, self.noise.call = rows, call
            raise

    def backward(self, loss: Tensor, gradient: Any = None, examples: int | None = None) -> None:
        """Add this batch's gradients, summed over all ranks, to what is held. Collective.

        Args:
            loss: what is differentiated: one number, or with `gradient` a tensor of any shape.
            gradient: the gradient of `loss`, already weighted by the examples (for an inner pipeline stage).
            examples: how many examples `loss` is the mean of, where slices are uneven: then all ranks must say
                so. May be 0 on some ranks, which must run forward and backward all the same.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward: needs the Tensor that the loss function returned, not {type(loss).__name__}")
        if self._averaged:
            raise RuntimeError("backward: the mean gradient was already taken: call step() or zero_grad() first")
        if examples is not None and not (isinstance(examples, int | np.integer) and examples >= 0):
            raise ValueError(f"backward: rank {self.comm.rank} gave examples={examples!r}, not an integer of 0 or more")
        for unit in self.units:
            for parameter in unit.parameters:
                if parameter.requires_grad != unit.trainable:
                    raise RuntimeError(f"requires_grad of {parameter.name} was changed after wrapping: do it before")
        weight = self._tally.add(examples)
        if gradient is None:
            gradient = xp.full(loss.shape, weight, dtype=np.float64) if loss.size == 1 else None
        listener = Listener(self)
        try:
            autograd.backward(loss, gradient, listener)
            listener.reduce_finished()
        except BaseException:
            self.zero_grad()  # what was collected is no longer anyone's mean
            raise
        finally:
            listener.close()
        self._micro_batch += 1
        self.noise.at(self.steps, self._micro_batch)

    def step(self) -> None:
        """Update the weights by the mean of the gradients since the last step, and let go of them. Collective.

        Raises FloatingPointError on every rank, naming the parameters, where a gradient is inf or NaN; weights,
        moments and the count of steps are then as before. RuntimeError without gradients.
        """
        self._average()
        if self._bad:
            refuse_bad_numbers(self.comm, self._trained, self.steps + 1)
        self.make_states()
        for unit in self._trained:
            weights, gradient = self.mine(unit, unit.weights), self.mine(unit, unit.gradient)
            self.optimizer.update(self.steps + 1, weights, gradient, unit.state or {})
            unit.version += 1
            with self._on(unit):
                self.publish(unit)
        self.steps += 1
        self.zero_grad()

    def make_states(self) -> None:
        """Give each trained unit the optimizer's state, where it has none yet; out of memory, none keeps a new one."""
        fresh = [unit for unit in self._trained if unit.state is None]
        try:
            for unit in fresh:
                unit.state = self.optimizer.init(self.mine(unit, unit.weights))
        except MemoryError:
            for unit in fresh:
                unit.state = None
            raise

    def zero_grad(self) -> None:
        """Forget all gradients since the last step, as if `backward` had not been called."""
        for unit in self.units:
            unit.drop_gradients()
        self._forget()
        self._micro_batch = 0
        if hasattr(self, "noise"):
            self.noise.at(self.steps, 0)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` adds to this rank's own whole gradients; the next one outside reduces their sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the mean gradient so that its 2-norm is at most `max_norm`; return the norm before. Collective.

        As torch.nn.utils.clip_grad_norm_. A norm that is inf or NaN changes nothing: `step` will refuse it.
        """
        if not max_norm > 0:
            raise ValueError(f"clip_grad_norm: max_norm must be more than 0, not {max_norm}")
        self._average()
        norm = norm_of(self.comm, square_sums(self))
        if not math.isfinite(norm) and not self._bad:
            raise FloatingPointError("clip_grad_norm: the squares of these gradients overflow, and nothing was clipped")
        if math.isfinite(norm) and norm > max_norm:
            for unit in self._trained:
                divide(unit.gradient, norm / max_norm)
        return norm

    # Looking at what is held.

    def memory(self) -> dict[str, int]:
        """Bytes of the arrays that this rank holds now: weights, gradients, optimizer."""
        held = [unit.held() for unit in self.units]
        return {term: sum(h[term] for h in held) for term in ("weights", "gradients", "optimizer")}

    def gather_parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """All parameters by name, whole, as NumPy copies, on every rank. Collective; one unit at a time."""
        found = {}
        with self.comm.label("gather_parameters"):
            for unit in self.units:
                with self._whole([unit]):
                    found.update({p.name: np.array(to_host(p.data)) for p in unit.parameters})
        return {name: found[name] for name, _ in self.model.named_parameters()}

    def gather_optimizer_state(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """The optimizer's state of each trained parameter, by name and then by the state's name, like
        `gather_parameters`. Empty before the first step. Collective."""
        found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        for unit, (part, everywhere) in shares(self).items():
            for key, vector in (unit.state or {}).items():
                whole = xp.zeros(unit.length, vector.dtype)
                whole[part] = vector
                if not everywhere:
                    with self.comm.label("gather_parameters"), self._on(unit):
                        ring.all_reduce(self.comm, ring.bits(whole))
                for parameter, piece in unit.split(whole):
                    found.setdefault(parameter.name, {})[key] = np.array(to_host(piece))
        return found

    # Saving and going on.

    def save(self, path: str | Path, extra: Any = None, keep_last: int | None = None) -> Path:
        """Save weights, moments and settings in a new directory `path`/step-N, and return that. Collective.

        The files do not depend on stage and number of ranks. Each rank writes its own part; nothing is gathered.

        Args:
            path: a directory that all ranks see, for the checkpoints of one training.
            extra: what else that needs to go on, such as its place in the data: what JSON can hold, the same on
                every rank. (Tuples come back as lists, keys as strings, NumPy's numbers as Python's.)
            keep_last: remove all but this many checkpoints in `path`, the oldest first.

        Raises RuntimeError between `backward` and `step`; CheckpointError, on every rank, where the files cannot be
        written: the checkpoints before are then as they were.
        """
        with self.comm.label("checkpoint"):
            return checkpoint.save(self, path, extra, keep_last)

    def load(self, path: str | Path) -> Any:
        """Go on where the checkpoint `path`, or the latest one in it, was saved; return its `extra`. Collective.

        Any stage on any number of ranks loads what any other saved. Weights, moments, steps, seed and the
        optimizer's settings (lr too) become those of the checkpoint; gradients are forgotten.
        Raises CheckpointError, on every rank, for files that are damaged or of another model; nothing has changed then.
        """
        with self.comm.label("checkpoint"):
            return checkpoint.load(self, path)

    # How units become whole.

    def _on(self, unit: Unit) -> Any:
        return self.comm.label(unit=unit.index, names=self._names)

    @contextmanager
    def _whole(self, units: list[Unit]) -> Iterator[None]:
        """Inside, these units are whole; those that were not before are released again, whatever happens."""
        absent = [unit for unit in units if not unit.whole]
        try:
            for unit in absent:
                with self._on(unit):
                    self.gather(unit)
            yield
        finally:
            for unit in absent:
                self.release(unit)

    def _forget(self) -> None:
        self._tally = Tally()
        self._averaged = False
        self._bad = False

    def _average(self) -> None:
        """Divide the sums by the number of examples: once between `backward` and `step`."""
        if self._averaged:
            return
        if any(unit.local is not None for unit in self.units):
            raise RuntimeError("step: gradients are still local: the last backward must be outside no_sync")
        if not self._trained or any(unit.gradient is None for unit in self._trained):
            raise RuntimeError("step: there are no gradients: call backward first")
        bad = not all_finite(*(unit.own(unit.gradient) for unit in self._trained))
        count, self._bad = self._tally.agree(self.comm, bad)
        for unit in self._trained if count != 1 else ():
            divide(unit.gradient, count)
        self._averaged = True
