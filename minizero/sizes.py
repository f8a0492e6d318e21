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
class Piece:
    """What a pipeline does not cut: the numbers of its units; bytes of its input, and of its output where that is an
    array of its own, which a stage keeps where they come from, or go to, another stage."""

    units: tuple[int, ...]
    received: int
    sent: int


@dataclass(frozen=True)
class Sizes:
    """A model: its units in order of use, its operations in order of the forward, and the loss after them.

    Where no operations are given, each parameter is multiplied by once; a root's also looked up in the beginning.
    pieces: what a pipeline may cut between. micro_batches: backwards per step; live: those of them whose
    activations are kept at the same time.
    """

    units: tuple[UnitSize, ...]
    operations: tuple[Operation, ...] = ()
    loss: Operation = Operation(-1)
    pieces: tuple[Piece, ...] = ()
    micro_batches: int = 1
    live: int = 1

    @property
    def parameters(self) -> int:
        return sum(unit.elements for unit in self.units)

    @property
    def activations(self) -> int:
        """Bytes of one micro-batch that are kept when its backward begins (twice as many in float64)."""
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

    def stage(self, stage: int, stages: int, micro_batches: int = 1) -> Sizes:
        """The part of the model that a stage of a pipeline has, cut as `pipeline.Stage` cuts it; under 1F1B."""
        if not 1 <= stages <= len(self.pieces):
            raise ValueError(f"a model of {len(self.pieces)} pieces cannot be cut in a pipeline of {stages} stages")
        first, stop = (len(self.pieces) * i // stages for i in (stage, stage + 1))
        mine = [i for piece in self.pieces[first:stop] for i in piece.units]
        if any(unit.root for unit in self.units) and stages > 1:
            raise ValueError("a tied embedding is used by the first and by the last stage: plan with tied=0")
        at = {old: new for new, old in enumerate(mine)}
        operations = [replace(each, unit=at[each.unit]) for each in self.operations if each.unit in at]
        loss = self.loss
        if stage > 0:
            kept = self.pieces[first].received
            operations.insert(0, Operation(0, None, kept, kept, kept, kept, inside=False))
        if stage < stages - 1:
            kept, loss = self.pieces[stop - 1].sent, Operation(-1)
            operations.append(Operation(len(mine) - 1, None, kept, kept, kept, kept, inside=False))
        part = _model([replace(self.units[i], activations=0) for i in mine], operations, loss)
        return replace(part, micro_batches=micro_batches, live=min(stages - stage, micro_batches))


def mlp(sizes: Sequence[int], batch: int, tp: int = 1) -> Sizes:
    """`nn.MLP(sizes)` and `cross_entropy`, for `batch` examples. Each relu's result is kept, and probabilities.

    With `tp`, the slices of one of so many tensor-parallel ranks.
    """
    if len(sizes) < 2 or min(*sizes, batch) < 1:
        raise ValueError(f"an MLP needs an input and an output size, and a batch, all at least 1, not {sizes}, {batch}")
    units, operations, pieces = [], [], []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        pair = i + i % 2 < len(sizes) - 2 or i % 2 == 1  # the last one of an odd number is whole
        column, row = (tp if pair and i % 2 == 0 else 1), (tp if pair and i % 2 == 1 else 1)
        _divides(tp if pair else 1, (outputs, inputs)[i % 2], "outputs" if column > 1 else "inputs")
        inputs, outputs = inputs // row, outputs // column
        units.append(UnitSize(f"layers.{i}", (inputs * outputs, outputs)))
        x, y = FLOAT * batch * inputs, FLOAT * batch * outputs
        pieces.append(Piece((i,), x, 0))
        batches = x if i == 0 else 0  # a copy of the input; later inputs are kept as results
        operations.append(Operation(i, 0, batches, batches, batches + y, y + x * (i > 0)))
        if i < len(sizes) - 2:
            operations.append(Operation(i, None, y, y, 2 * y, 2 * y + y // FLOAT, inside=False))  # relu
    return _model(units, operations, _loss(batch, sizes[-1]), pieces)


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
    tp: int = 1,
) -> Sizes:
    """`nn.GPT` and `cross_entropy`, for `batch` sequences of `time` tokens (None: as many as the context).

    With `tp`, the slices of one of so many tensor-parallel ranks.
    """
    time = context if time is None else time
    if min(vocab, context, width, heads, layers, batch, time) < 1:
        raise ValueError("a GPT's vocab, context, width, heads, layers, batch and time must be at least 1")
    if width % heads:
        raise ValueError(f"a GPT's width must be a multiple of its heads: {width} is none of {heads}")
    if time > context:
        raise ValueError(f"a GPT cannot read {time} tokens in a row with a context of {context}")
    _divides(tp, heads, "attention heads")
    rows, c, heads = batch * time, width, heads // tp
    s, scale, mask = FLOAT * rows * c, FLOAT * rows, time**2  # bytes of (B, T, C), of (B, T, 1), of bools (T, T)
    a = FLOAT * batch * heads * time**2  # (B, H, T, T)
    kept = a + mask + 8 + FLOAT  # probabilities; where they may not look; a factor; a zero
    head = 0 if tied else layers + 3
    column, q, total = (c * c // tp, c // tp), s // tp, s * (tp > 1)  # q: bytes of a slice; what an all-reduce takes
    # norms; query, key, value, out; up, down
    block = (c, c, c, c, *3 * column, c * c // tp, c, 4 * c * c // tp, 4 * c // tp, 4 * c * c // tp, c)
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
        (4, q, s, s + q, 3 * s + 2 * q + total),  # query: in the backward, it is the last that needs norm1's result
        (6, q, 0, s + q, 4 * s + 2 * q),  # key
        (8, q, 0, s + q, 3 * s + 2 * q),  # value
        (None, kept, kept + 2 * q, s + 3 * a + 3 * mask, s + max(q + 3 * a, 3 * q + a)),  # query @ key, softmax
        (None, q, q, s + 2 * q + a, s + 2 * q + a),  # ... @ value, and the heads joined
        (10, 0, q, 2 * s + a + total, 2 * s),  # out, and the first sum
        (2, 2 * s + scale, s + scale, 4 * s + scale, 5 * s),  # norm2
        (12, 4 * q, s, 2 * s + 4 * q, 2 * s + 4 * q + total),  # up
        (None, 4 * q, 4 * q, 2 * s + 12 * q, s + 24 * q),  # gelu
        (14, 0, 4 * q, 3 * s + total, s + 4 * q),  # down, and the second sum
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
    pieces = [Piece((i,), s, s) for i in range(2, layers + 2)]
    pieces[0] = replace(pieces[0], units=(0, 1, *pieces[0].units))
    pieces[-1] = replace(pieces[-1], units=(*pieces[-1].units, *range(layers + 2, len(units))))
    return _model(units, operations, _loss(rows, vocab), pieces)


def _divides(tp: int, count: int, what: str) -> None:
    if tp < 1 or count % tp:
        raise ValueError(f"tp = {tp} ranks cannot share {count} {what}")


def _loss(rows: int, classes: int) -> Operation:
    """A cross-entropy, which keeps probabilities in place of logits, and row numbers."""
    logits, numbers = FLOAT * rows * classes, 2 * 8 * rows + FLOAT  # ... and targets, and the loss itself
    return Operation(-1, None, logits + numbers, logits + numbers, 2 * logits + numbers, logits)


def _model(
    units: Sequence[UnitSize], operations: Sequence[Operation], loss: Operation, pieces: Sequence[Piece] = ()
) -> Sizes:
    """With the activations of each unit."""
    kept: Counter[int] = Counter()
    for operation in operations:
        kept[operation.unit] += operation.kept
    units = [replace(unit, activations=kept[i]) for i, unit in enumerate(units)]
    return Sizes(tuple(units), tuple(operations), loss, tuple(pieces))


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
