"""What is one Adam (and SGD) update on a flat vector, and what does it keep between steps?

An optimizer knows nothing of ranks, units or layers. It is given a vector of weights, a vector of gradients of
the same length and its own state for them. Every operation is elementwise: an update of a slice has the bits
of the slice of an update. That is why a rank may update 1/N of a vector on its own.

The vectors are walked in blocks small enough to stay in cache, with scratch that is reused: an update is then
limited by arithmetic, not by memory, and allocates nothing. Weights and gradients may be bfloat16: each
block is computed in float32, and the new weight is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import numpy as np

from .backend import BLOCK, MOST_BLOCKS, Array, to_host, working, xp

State = dict[str, Array]  # what an optimizer keeps for one vector, by the names that PyTorch uses


class Scratch:
    """Arrays of a block that are used again and again, by one thread: `scratch(key, count, dtype)`."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, np.dtype[Any], int], Array] = {}

    def __call__(self, key: str, count: int, dtype: np.dtype[Any]) -> Array:
        which = key, dtype, get_ident()
        if which not in self.arrays or self.arrays[which].size < count:
            self.arrays[which] = xp.empty(max(BLOCK, count), dtype)
        return self.arrays[which][:count]


def block_size(size: int) -> int:
    """Elements of the blocks in which a vector of `size` is walked."""
    return max(BLOCK, -(-size // MOST_BLOCKS))


def blocks(size: int) -> Iterator[slice]:
    """Slices of at most so many elements that cover a vector of `size`."""
    step = block_size(size)
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


_shared = Scratch()


def add(target: Array, source: Array) -> None:
    """target += source, both (n,) and of one dtype; bfloat16 is added in float32 and rounded once."""
    wide = working(target.dtype)
    if target.dtype == wide:
        target += source
        return
    for block in blocks(target.size):
        a, b = (_shared(key, block.stop - block.start, wide) for key in "ab")
        a[:], b[:] = target[block], source[block]
        a += b
        target[block] = a


def divide(target: Array, divisor: float) -> None:
    """target /= divisor, for a vector (n,); bfloat16 is divided in float32 and rounded once."""
    wide, divisor = working(target.dtype), float(divisor)  # a NumPy float64 would compute in float64
    if target.dtype == wide:
        target /= divisor
        return
    for block in blocks(target.size):
        a = _shared("a", block.stop - block.start, wide)
        a[:] = target[block]
        a /= divisor
        target[block] = a


def in_float(vector: Array) -> Iterator[Array]:
    """The blocks of a vector, bfloat16 as float32 in scratch: look at each before you take the next."""
    wide = working(vector.dtype)
    for block in blocks(vector.size):
        part = vector[block]
        if vector.dtype != wide:
            part = _shared("a", part.size, wide)
            part[:] = vector[block]
        yield part


def all_finite(*vectors: Array) -> bool:
    """Are all elements finite? Blocks' sums say so at once, unless one overflows: then each element is looked at."""
    sums = [part.sum() for vector in vectors for part in in_float(vector)]
    if not sums or bool(xp.isfinite(xp.stack(sums)).all()):  # the only time that a GPU is asked
        return True
    return all(bool(xp.isfinite(part).all()) for vector in vectors for part in in_float(vector))


def square_sums(vectors: list[Array]) -> list[float]:
    """Σ x² of each of some vectors (n,), in float64, block by block."""
    totals = xp.zeros(len(vectors), np.float64)
    for i, vector in enumerate(vectors):
        for block in blocks(vector.size):
            wide = vector[block].astype(np.float64)
            wide *= wide
            totals[i] += wide.sum()
    return to_host(totals).tolist()


class Optimizer:
    """What SGD and Adam share: the walk over blocks, casting, and the fp32 master copy.

    Args:
        lr: learning rate; may be changed between steps.
        master: keep a float32 copy of 16-bit weights and update that one; the weights are its rounded values.
            It makes no difference to weights that are not 16-bit.
    """

    moments: tuple[str, ...] = ()  # names of the vectors kept per weight, zero at first

    def __init__(self, lr: float, master: bool = False) -> None:
        self._check("lr", lr)
        self.lr, self.master = lr, master
        self._scratch = Scratch()

    def _check(self, what: str, *values: float, below: float = math.inf) -> None:
        if not all(0 <= value < below for value in values):
            raise ValueError(f"{type(self).__name__}: {what} must be at least 0 and less than {below}, not {values}")

    def settings(self) -> dict[str, Any]:
        """All that was chosen: lr, master, and what a subclass adds."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def init(self, weights: Array) -> State:
        """Fresh state for `weights`, (n,): moments and master copy of n elements, float32 for 16-bit weights."""
        wide = working(weights.dtype)
        for key in ("weights", "gradient", "a")[2 * (weights.dtype == wide) :]:
            self._scratch(key, block_size(weights.size), wide)  # now: an update allocates nothing, and cannot fail
        state = {moment: xp.zeros(weights.size, wide) for moment in self.moments}
        if self.master and weights.dtype != wide:
            state["master"] = weights.astype(wide)
        return state

    def update(self, step: int, weights: Array, gradient: Array, state: State) -> None:
        """One update, in place in `weights` (n,) and `state`; `gradient` (n,) is left as it is.

        `step` counts from 1. Raises ValueError where the lengths differ.
        """
        if weights.shape != gradient.shape or any(s.shape != weights.shape for s in state.values()):
            raise ValueError(f"optimizer: {weights.shape} weights, {gradient.shape} gradients, and state for "
                             f"{[s.shape for s in state.values()]}: all must have the same length")  # fmt: skip
        wide = working(weights.dtype)
        master = state.get("master")
        formula = self.formula(step)
        for block in blocks(weights.size):
            count = block.stop - block.start
            w, g = weights[block], gradient[block]
            if weights.dtype != wide:
                w, g = self._scratch("weights", count, wide), self._scratch("gradient", count, wide)
                w[:], g[:] = weights[block] if master is None else master[block], gradient[block]
            formula(w, g, [state[moment][block] for moment in self.moments], self._scratch("a", count, wide))
            if weights.dtype != wide:
                weights[block] = w
                if master is not None:
                    master[block] = w

    def formula(self, step: int) -> Callable[[Array, Array, list[Array], Array], None]:
        """The update of step `step`: a function (weights, gradient, moments, a) of one block.

        It changes weights and moments in place, must not change the gradient, and may use `a` as it likes.
        """
        raise NotImplementedError


class SGD(Optimizer):
    """w -= lr * v, where v = momentum * v + g (v = g without momentum)."""

    def __init__(self, lr: float, momentum: float = 0.0, master: bool = False) -> None:
        super().__init__(lr, master)
        self._check("momentum", momentum, below=1)
        self.momentum = momentum
        self.moments = ("momentum_buffer",) if momentum else ()

    def formula(self, step: int) -> Callable[[Array, Array, list[Array], Array], None]:
        lr, momentum = float(self.lr), float(self.momentum)  # a NumPy float64 would compute in float64

        def update(w: Array, g: Array, moments: list[Array], a: Array) -> None:
            for v in moments:
                v *= momentum
                v += g
                g = v
            xp.multiply(g, lr, out=a)
            w -= a

        return update


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1), with decoupled weight decay (AdamW, arXiv 1711.05101).

        w -= lr * weight_decay * w
        m  = beta1 * m + (1 - beta1) * g
        v  = beta2 * v + (1 - beta2) * g * g
        w -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)

    The same as torch.optim.AdamW, up to rounding. (The last line is computed as the paper's section 2 suggests,
    with both corrections in two constants: rate * m / (sqrt(v) + floor).)
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master: bool = False,
    ) -> None:
        super().__init__(lr, master)
        beta1, beta2 = betas
        self._check("betas", beta1, beta2, below=1)
        self._check("eps and weight_decay", eps, weight_decay)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def formula(self, step: int) -> Callable[[Array, Array, list[Array], Array], None]:
        beta1, beta2, lr = *map(float, self.betas), float(self.lr)  # a NumPy float64 would compute in float64
        decay = 1 - lr * float(self.weight_decay)
        root = math.sqrt(1 - beta2**step)
        rate, floor = lr * root / (1 - beta1**step), float(self.eps) * root

        def update(w: Array, g: Array, moments: list[Array], a: Array) -> None:
            m, v = moments
            m *= beta1
            xp.multiply(g, 1 - beta1, out=a)
            m += a
            v *= beta2
            xp.multiply(g, 1 - beta2, out=a)
            a *= g
            v += a
            xp.sqrt(v, out=a)
            a += floor
            xp.divide(m, a, out=a)
            a *= rate
            if decay != 1:
                w *= decay
            w -= a

        return update
