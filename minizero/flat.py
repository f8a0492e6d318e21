"""How does a layer become one padded vector with one owner for every element?

    weight (3, 2)          bias (3,)   padding        N = 4: four equal chunks, chunk r belongs to rank r
    w0 w1 w2 w3 w4 w5      b0 b1 b2    0 0 0     ->   [w0 w1 w2] [w3 w4 w5] [b0 b1 b2] [0 0 0]

The parameters of one module, laid back to back, are a *unit*: what is reduced at once, and under ZeRO-3 gathered
at once. A parameter is a view into its unit's vector. Chunks do not respect parameters, and need not: the
optimizer works element by element.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .backend import Array, working, xp
from .nn import Module
from .optim import State, add
from .parameter import Parameter


class Unit:
    """One vector's worth of parameters, and what this rank holds of it.

    Attributes:
        index, name: its number and name among the model's units, in order of use.
        module: the module around whose forward the unit must be whole.
        parameters: what the vector consists of, in this order; all of one dtype, all trained or all frozen.
        length: elements of the vector, padding included: a multiple of the number of ranks.
        weights: what this rank holds at rest: the whole vector, or its own chunk of it.
        gradient: what this rank keeps of the sum over ranks: the whole vector or a chunk; None: nothing.
        local: this rank's own whole gradient, as long as it is not reduced; None: nothing.
        state: the optimizer's state for the elements that this rank updates; None before the first step.
        version: how often the weights were changed by an engine.
        collecting: is an engine's backward running, so that gradients are wanted here?
    """

    def __init__(
        self, index: int, name: str, module: Module, parameters: list[Parameter], rank: int, ranks: int
    ) -> None:
        self.index, self.name, self.module, self.parameters = index, name, module, parameters
        self.dtype = parameters[0].dtype
        self.trainable = parameters[0].requires_grad
        ends = np.cumsum([p.size for p in parameters]).tolist()
        self.spans = {p: slice(end - p.size, end) for p, end in zip(parameters, ends, strict=True)}
        self.size: int = ends[-1]
        self.length = -(-self.size // ranks) * ranks
        self.chunk = slice(self.length // ranks * rank, self.length // ranks * (rank + 1))
        self.weights: Array = None
        self.gradient: Array | None = None
        self.local: Array | None = None
        self.state: State | None = None
        self.version = 0
        self.collecting = False
        self._vector: Array | None = None  # what the parameters are views of
        self._filled: set[Parameter] = set()  # the parameters that `local` has gradients of
        self._given: dict[Parameter, Array] = {}  # the parts of `local` that gradients are written to directly
        for parameter in parameters:
            parameter.unit = self

    def own(self, vector: Array) -> Array:
        """This rank's chunk of a whole vector, as a view. What is only the chunk already is returned as it is."""
        return vector[self.chunk] if vector.size == self.length else vector

    def own_parts(self) -> list[Array]:
        """What this rank's own chunk of the gradient has of each of the unit's parameters (often nothing)."""
        first, own = self.chunk.start, self.own(self.gradient)
        return [own[max(s.start - first, 0) : max(s.stop - first, 0)] for s in self.spans.values()]

    def blank(self) -> Array:
        """A new vector for the whole unit, with arbitrary contents."""
        return xp.empty(self.length, self.dtype)

    def split(self, vector: Array) -> Iterator[tuple[Parameter, Array]]:
        """Each parameter with its part of a whole vector, as a view of the parameter's shape."""
        return ((p, vector[span].reshape(p.shape)) for p, span in self.spans.items())

    def materialise(self, seed: int) -> Array:
        """Draw all parameters (or take the values they have) into one new vector, padding zero; bind and return it."""
        vector = self.blank()
        vector[self.size :] = 0
        for parameter, span in self.spans.items():
            parameter.fill(vector[span], seed)
        self.bind(vector)
        return vector

    @property
    def whole(self) -> bool:
        """Do the parameters have values here, now?"""
        return self._vector is not None

    def bind(self, vector: Array) -> None:
        """Make the parameters views into `vector`."""
        self._vector = vector
        for parameter, view in self.split(vector):
            parameter.bind(view)

    def unbind(self) -> None:
        """Let go of the vector: nothing here keeps it alive any more."""
        self._vector = None
        for parameter in self.parameters:
            parameter.bind(None)

    def room(self, parameter: Parameter) -> Array | None:
        """The parameter's part of `local`, once, where a gradient can be written as it is: first, and not rounded."""
        taken = parameter in self._filled or parameter in self._given
        if not self.collecting or taken or self.dtype != working(self.dtype):
            return None
        if self.local is None:
            self.local = self.blank()
        self._given[parameter] = self.local[self.spans[parameter]].reshape(parameter.shape)
        return self._given[parameter]

    def collect(self, parameter: Parameter, gradient: Array) -> None:
        """Add one parameter's fresh gradient to `local`, rounded to the unit's dtype."""
        if self.local is None:
            self.local = self.blank()
        place = self.local[self.spans[parameter]].reshape(parameter.shape)
        if parameter in self._filled:
            add(place.reshape(-1), gradient.reshape(-1).astype(self.dtype))
        elif gradient is not self._given.get(parameter):
            place[...] = gradient
        self._filled.add(parameter)

    def take_local(self) -> Array:
        """Hand over the whole local gradient; zeros where no gradient was collected."""
        vector = self.blank() if self.local is None else self.local
        for parameter, span in self.spans.items():
            if parameter not in self._filled:
                vector[span] = 0
        vector[self.size :] = 0
        self.local = None
        self._filled.clear()
        self._given.clear()
        return vector

    def keep(self, summed: Array) -> None:
        """Add what this rank keeps of a sum over ranks to `gradient`."""
        if self.gradient is None:
            self.gradient = summed
        else:
            add(self.gradient, summed)

    def drop_gradients(self) -> None:
        self.gradient = self.local = None
        self._filled.clear()
        self._given.clear()

    def held(self) -> dict[str, int]:
        """Bytes of the arrays that this rank holds for this unit, by term."""
        vectors = {id(v): v for v in (self.weights, self._vector) if v is not None}
        gradients = [g for g in (self.gradient, self.local) if g is not None]
        return {
            "weights": sum(v.nbytes for v in vectors.values()),
            "gradients": sum(g.nbytes for g in gradients),
            "optimizer": sum(s.nbytes for s in (self.state or {}).values()),
        }


def units_of(model: Module, rank: int, ranks: int) -> list[Unit]:
    """All units of a model, in order of use.

    A parameter that several of `model.units()` share, or that is in none of them, belongs to the root unit, which
    comes first and whose module is the model. Where a module mixes dtypes, or trained and frozen
    parameters, it has one unit for each kind.
    """
    modules = model.units()
    users: dict[Parameter, list[str]] = {parameter: [] for parameter in model.parameters()}
    for name, module in modules:
        for parameter in module.parameters():
            users.setdefault(parameter, []).append(name)
    groups = [("(root)", model, [p for p, names in users.items() if len(names) != 1])]
    groups += [(name, module, [p for p in module.parameters() if len(users[p]) == 1]) for name, module in modules]

    units: list[Unit] = []
    for name, module, parameters in groups:
        kinds = dict.fromkeys((p.requires_grad, p.dtype) for p in parameters)
        for trained, dtype in kinds:
            members = [p for p in parameters if (p.requires_grad, p.dtype) == (trained, dtype)]
            label = (
                name
                + ("" if trained else " (frozen)")
                + (f" ({dtype})" if len({p.dtype for p in parameters}) > 1 else "")
            )
            units.append(Unit(len(units), label, module, members, rank, ranks))
    return units
