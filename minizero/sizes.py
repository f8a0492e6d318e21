"""How large is a model: its units, and what each of its operations makes, keeps and needs for a moment?

    an MLP's layer          product: the weight, cast to float32;  result -> relu: kept until its own backward
    per token in a block    norm1 2C, query, key, value 3C, heads joined C, norm2 2C, the two ends of gelu 8C: 16C
                            kept, and for each head and each token that it looks at one probability

Numbers of elements and bytes, worked out from functional.py and nn.py by reading. There are no arrays here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine

FLOAT = 4  # bytes of an activation, unless the model is float64


@dataclass(frozen=True)
class UnitSize:
    """A unit: the elements of its parameters, in the order of its vector.

    activations: bytes that its forward leaves for the backward. root: its module is the whole model.
    draw: bytes per element that drawing a parameter takes for a moment: 12 for `uniform`, 8 for `normal`.
    """

    name: str
    parameters: tuple[int, ...]
    trainable: bool = True
    activations: int = 0
    root: bool = False
    draw: int = 12

    @property
    def elements(self) -> int:
        return sum(self.parameters)

    def length(self, ranks: int) -> int:
        """Elements of its vector, padding included."""
        return -(-self.elements // ranks) * ranks


@dataclass(frozen=True)
class Operation:
    """One operation of the forward, and its backward. All bytes are those of a float32 model.

    unit, parameter: the unit that it belongs to, and the index of the parameter that it uses (None: none).
    kept: what it adds to what is kept for the backward. freed: what goes when its own backward has run.
    forward: what is alive while it runs, beside what operations before it have kept: inputs, scratch, result.
    backward: gradients and scratch while its backward runs. Both without what the parameter itself takes.
    product: it multiplies by the parameter. inside: it runs inside the unit's module, as an MLP's relu does not.
    """

    unit: int
    parameter: int | None = None
    kept: int = 0
    freed: int = 0
    forward: int = 0
    backward: int = 0
    product: bool = True
    inside: bool = True

    def scaled(self, factor: int) -> Operation:
        """The same with wider numbers."""
        names = ("kept", "freed", "forward", "backward")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Sizes:
    """A model: its units in order of use, its operations in order of the forward, and the loss after them.

    Where no operations are given, each parameter is multiplied by once; a root's also looked up in the beginning.
    """

    units: tuple[UnitSize, ...]
    operations: tuple[Operation, ...] = ()
    loss: Operation = Operation(-1)

    @property
    def parameters(self) -> int:
        return sum(unit.elements for unit in self.units)

    @property
    def activations(self) -> int:
        """Bytes that are kept when the backward begins (twice as many in float64)."""
        return sum(unit.activations for unit in self.units) + self.loss.kept

    @property
    def largest(self) -> UnitSize:
        return max(self.units, key=lambda unit: unit.elements)

    def schedule(self) -> Sequence[Operation]:
        """The operations, given or assumed."""
        if self.operations:
            return self.operations
        found, again = [], []
        for i, unit in enumerate(self.units):
            for j in range(len(unit.parameters)):
                kept = 0 if j else unit.activations
                found.append(Operation(i, j, kept, kept, kept, product=not unit.root))
                again += [Operation(i, j, inside=False)] if unit.root else []
        return found + again


def mlp(sizes: Sequence[int], batch: int) -> Sizes:
    """`nn.MLP(sizes)` and `cross_entropy`, for `batch` examples. Each relu's result is kept, and probabilities."""
    if len(sizes) < 2 or min(*sizes, batch) < 1:
        raise ValueError(f"an MLP needs an input and an output size, and a batch, all at least 1, not {sizes}, {batch}")
    units, operations = [], []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        units.append(UnitSize(f"layers.{i}", (inputs * outputs, outputs)))
        x, y = FLOAT * batch * inputs, FLOAT * batch * outputs
        batches = x if i == 0 else 0  # a copy of the input; later inputs are kept as results
        operations.append(Operation(i, 0, batches, batches, batches + y, y + x * (i > 0)))
        if i < len(sizes) - 2:
            operations.append(Operation(i, None, y, y, 2 * y, 2 * y + y // FLOAT, inside=False))  # relu
    return _model(units, operations, batch, sizes[-1])


def gpt(
    *,
    vocab: int,
    context: int,
    width: int,
    heads: int,
    layers: int,
    batch: int,
    time: int | None = None,
    tied: bool = True,
) -> Sizes:
    """`nn.GPT` and `cross_entropy`, for `batch` sequences of `time` tokens (None: as many as the context)."""
    time = context if time is None else time
    if min(vocab, context, width, heads, layers, batch, time) < 1:
        raise ValueError("a GPT's vocab, context, width, heads, layers, batch and time must be at least 1")
    if width % heads:
        raise ValueError(f"a GPT's width must be a multiple of its heads: {width} is none of {heads}")
    if time > context:
        raise ValueError(f"a GPT cannot read {time} tokens in a row with a context of {context}")
    rows, c = batch * time, width
    s, scale, mask = FLOAT * rows * c, FLOAT * rows, time**2  # bytes of (B, T, C), of (B, T, 1), of bools (T, T)
    a = FLOAT * batch * heads * time**2  # (B, H, T, T)
    kept = a + mask + 8 + FLOAT  # probabilities; where they may not look; a factor; a zero
    head = 0 if tied else layers + 3
    square = (c * c, c)
    block = (c, c, c, c, *4 * square, 4 * c * c, 4 * c, 4 * c * c, c)  # norms; query, key, value, out; up, down
    units = [
        UnitSize("(root)" if tied else "token", (vocab * c,), root=tied, draw=8),
        UnitSize("position", (context * c,), draw=8),
        *(UnitSize(f"blocks.{i}", block, draw=8) for i in range(layers)),
        UnitSize("norm", (c, c), draw=8),
        *([] if tied else [UnitSize("head", (vocab * c,), draw=8)]),
    ]
    # In a block, its input is alive throughout the forward, and the gradient that passes by throughout the backward.
    inner: tuple[tuple[int | None, int, int, int, int], ...] = (  # parameter, kept, freed, forward, backward
        (0, 2 * s + scale, s + scale, 3 * s + scale, 5 * s),  # norm1
        (4, s, s, 2 * s, 5 * s),  # query: in the backward, it is the last that needs norm1's result
        (6, s, 0, 2 * s, 6 * s),  # key
        (8, s, 0, 2 * s, 5 * s),  # value
        (None, kept, kept + 2 * s, s + 3 * a + 3 * mask, max(2 * s + 3 * a, 4 * s + a)),  # query @ key, softmax
        (None, s, s, 3 * s + a, 3 * s + a),  # ... @ value, and the heads joined
        (10, 0, s, 2 * s + a, 2 * s),  # out, and the first sum
        (2, 2 * s + scale, s + scale, 4 * s + scale, 5 * s),  # norm2
        (12, 4 * s, s, 6 * s, 6 * s),  # up
        (None, 4 * s, 4 * s, 14 * s, 25 * s),  # gelu
        (14, 0, 4 * s, 3 * s, 5 * s),  # down, and the second sum
    )
    operations = [
        Operation(0, 0, 8 * rows, 8 * rows, 8 * rows + 2 * s, 3 * s, product=False),
        Operation(1, 0, 8 * time, 8 * time, 3 * s, 2 * s, product=False),  # and the sum of both
    ]
    for i in range(2, layers + 2):
        operations += [replace(Operation(i, *each), product=each[0] not in (0, 2)) for each in inner]
    logits = FLOAT * rows * vocab
    operations += [
        Operation(layers + 2, 0, 2 * s + scale, s + scale, 3 * s + scale, 4 * s, product=False),
        Operation(head, 0, 0, s, s + logits, s + logits, inside=not tied),
    ]
    return _model(units, operations, rows, vocab)


def _model(units: list[UnitSize], operations: list[Operation], rows: int, classes: int) -> Sizes:
    """With the activations of each unit, and a loss that keeps probabilities in place of logits, and row numbers."""
    kept: Counter[int] = Counter()
    for operation in operations:
        kept[operation.unit] += operation.kept
    logits, numbers = FLOAT * rows * classes, 2 * 8 * rows + FLOAT  # ... and targets, and the loss itself
    loss = Operation(-1, None, logits + numbers, logits + numbers, 2 * logits + numbers, logits)
    return Sizes(tuple(replace(unit, activations=kept[i]) for i, unit in enumerate(units)), tuple(operations), loss)


def sizes_of(engine: Engine, activations: int = 0) -> Sizes:
    """The sizes of an engine's units. `activations`: bytes that a forward leaves (half of them, if it is float64),
    spread evenly over the units."""
    each = activations // max(len(engine.units), 1)
    return Sizes(
        tuple(
            UnitSize(u.name, tuple(p.size for p in u.parameters), u.trainable, each, u.module is engine.model)
            for u in engine.units
        )
    )
