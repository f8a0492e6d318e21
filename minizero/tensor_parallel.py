"""How do ranks share the arithmetic of one layer?

A pair of layers, y = f(x A) B, on two ranks that both have the whole x. A is cut by columns, B by rows:

    rank 0    x ──enter── f(x A₀) ── f(x A₀) B₀ ─┐                 f works element by element (gelu, relu), or head
                                                 ├─leave── y       by head: it needs nothing of the other rank.
    rank 1    x ──enter── f(x A₁) ── f(x A₁) B₁ ─┘

              forward                       backward
    enter     nothing: x is there           all-reduce: each rank has the gradient of x by its own path only
    leave     all-reduce: y is a sum        nothing: the gradient of y is there

So a pair costs one all-reduce forward and one backward, of one activation each (Shoeybi et al. 2019, arXiv 1909.08053,
section 3). A block of a GPT has two pairs: query, key and value with the output projection, and the feed-forward.

What is not cut (layer norms, embeddings, the bias that is added after `leave`) is held by all ranks of the group. They
compute the same from the same, and so stay equal without a message. Dropout acts between the pairs, on what is whole,
and draws the same numbers on all of them: an engine draws by the rank in the *data-parallel* group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import functional as F
from . import ring
from .autograd import Tensor
from .backend import Array, working, xp
from .comm import Communicator
from .nn import Init, Linear, Whole
from .operation import made, seen, tensor, value
from .parameter import DRAW_BLOCK, Parameter


class Slice(Parameter):
    """Slice `part[0]` of `part[1]` equal ones of a parameter `whole`, cut along an axis; drawn as that part of it.

    The values are those that the whole has, whatever the number of slices, though it never exists here.
    """

    __slots__ = ("axis", "part", "whole")

    def __init__(self, whole: Parameter, axis: int, split: Split) -> None:
        self.whole, self.axis, self.part = whole.shape, axis, (split.comm.rank, split.comm.size)
        shape = list(whole.shape)
        shape[axis] = split.share(shape[axis], f"a layer's {('outputs', 'inputs')[axis]}")
        super().__init__(shape, whole.init, whole.dtype, whole.requires_grad)

    def fill(self, flat: Array, seed: int) -> None:
        if self._data is not None:
            super().fill(flat, seed)
            return
        after = int(np.prod(self.whole[self.axis + 1 :], dtype=np.int64))
        size, at, generator = self.size * self.part[1], 0, self.generator(seed)
        for start in range(0, size, DRAW_BLOCK):  # all of it is drawn, and most of it dropped at once
            numbers = np.arange(start, min(start + DRAW_BLOCK, size))
            index = numbers // after % self.whole[self.axis]  # of each element, along the axis
            mine = self.init(generator, numbers.size)[index // self.shape[self.axis] == self.part[0]]
            flat[at : at + mine.size] = xp.asarray(mine)
            at += mine.size


class Split(Whole):
    """Builds this rank's slices of a model's layers: `nn.GPT(..., split=mz.Split(mesh.tp))`.

    All ranks of the tensor-parallel group `comm` build the same model, and feed it the same examples.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.names: list[str] = []  # of all places where the group meets, for error messages

    def share(self, count: int, what: str) -> int:
        """`count` over the size of the group. Raises ValueError where that is no whole number."""
        if count % self.comm.size:
            fitting = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
            raise ValueError(f"tp = {self.comm.size} ranks cannot share {what}: {count} is not a multiple of it; "
                             f"tp may be {', '.join(map(str, fitting))}")  # fmt: skip
        return count // self.comm.size

    def column(self, inputs: int, outputs: int, dtype: Any, init: Init | None = None, enter: bool = True) -> Linear:
        return ColumnParallel(inputs, outputs, self, dtype, init, enter)

    def row(self, inputs: int, outputs: int, dtype: Any, init: Init | None = None) -> Linear:
        return RowParallel(inputs, outputs, self, dtype, init)

    def heads(self, count: int) -> int:
        return self.share(count, "attention heads")

    def enter(self) -> Callable[[Tensor], Tensor]:
        """A function for the input of column-parallel layers. Its backward is collective over the group."""
        total = self.sums("the backward of entrance")

        def entered(x: Any) -> Tensor:
            return seen("enter", x, lambda a: a, total) if getattr(x, "requires_grad", False) else tensor(x)

        return entered

    def leave(self) -> Callable[[Tensor], Tensor]:
        """A function for the output of a row-parallel layer: the sum over the group. Collective."""
        total = self.sums("row-parallel layer")
        return lambda x: made("leave", total(value(x, working(x.dtype))), (x, lambda g: g))

    def sums(self, what: str) -> Callable[[Array], Array]:
        """A function that adds up an array of any shape over the group, into a new one. Each says which one it is."""
        number = len(self.names)
        self.names.append(f"{what} {sum(name.startswith(what) for name in self.names)}")

        def total(array: Array) -> Array:
            n = self.comm.size
            vector = xp.zeros(-(-array.size // n) * n, array.dtype)
            vector[: array.size] = array.reshape(-1)
            with self.comm.label("all_reduce", number, self.names):
                return ring.all_reduce(self.comm, vector)[: array.size].reshape(array.shape)

        return total


class ColumnParallel(Linear):
    """x (..., inputs) -> (..., outputs/n): weight (outputs/n, inputs), bias (outputs/n,). x is whole on every rank.

    Without `enter`, x has entered already: several layers have the same input.
    """

    def __init__(
        self, inputs: int, outputs: int, split: Split, dtype: Any, init: Init | None = None, enter: bool = True
    ) -> None:
        super().__init__(inputs, outputs, dtype=dtype, init=init)
        self.weight = Slice(self.weight, 0, split)
        self.bias = None if self.bias is None else Slice(self.bias, 0, split)
        self.enter: Callable[[Any], Tensor] = split.enter() if enter else tensor

    def forward(self, x: Any) -> Tensor:
        return F.linear(self.enter(x), self.weight, self.bias)


class RowParallel(Linear):
    """x (..., inputs/n) -> (..., outputs): weight (outputs, inputs/n), bias (outputs,). The result is whole everywhere.

    The bias is added after the sum, once. Collective over the group, forward.
    """

    def __init__(self, inputs: int, outputs: int, split: Split, dtype: Any, init: Init | None = None) -> None:
        super().__init__(inputs, outputs, dtype=dtype, init=init)
        self.weight = Slice(self.weight, 1, split)
        self.leave = split.leave()

    def forward(self, x: Any) -> Tensor:
        return self.leave(F.linear(x, self.weight)) + self.bias
