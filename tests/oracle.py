"""The truth: what N ranks must compute, computed by one process, one slice after another, on whole tensors.

Nothing here comes from the ring, the units, the optimizers or the engine: the layout, the order of additions and the
formulas are written down a second time, from their definitions. Only the model (forward and backward of one slice)
is the one that is trained. All else is NumPy.

    truth = Oracle(model, mz.SGD(lr=0.1), n=5)                      # a model of its own, in no engine
    norm = truth.step(loss, batches)                                # batches[rank][micro-batch]: what `loss` takes
    truth.weights["layers.0.weight"], truth.state["layers.0.weight"]["momentum_buffer"]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import minizero as mz
from minizero.backend import bfloat16, to_host, xp
from minizero.nn import Module
from minizero.optim import block_size  # part of the norm's definition: squares are added in blocks of so many

Vector = np.ndarray[Any, Any]
Loss = Callable[..., mz.Tensor]  # (model or engine, batch) -> one number


def wide(array: Vector) -> Vector:
    """What is computed with: float32 for bfloat16."""
    return array.astype(np.float32) if array.dtype == bfloat16 else array


def added(x: Vector, y: Vector) -> Vector:
    return (wide(x) + wide(y)).astype(x.dtype)


def divided(x: Vector, divisor: float) -> Vector:
    return (wide(x) / divisor).astype(x.dtype)


def layout(model: Module) -> list[list[str]]:
    """Names of the parameters of each unit, in the order in which they lie in its vector.

    A unit is what belongs to exactly one of `model.units()`; all else is the root unit. Trained and frozen parameters,
    and those of different dtypes, are never in one vector.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = [[names[id(parameter)] for parameter in module.parameters()] for _, module in model.units()]
    homes = Counter(name for members in modules for name in members)
    units: dict[Any, list[str]] = {}
    for number, members in enumerate([[name for name in parameters if homes[name] != 1], *modules]):
        for name in members:
            if number == 0 or homes[name] == 1:
                units.setdefault((number, parameters[name].requires_grad, parameters[name].dtype), []).append(name)
    return list(units.values())


class Noise:
    """Dropout's random numbers: from (seed, rank, step, micro-batch, call) alone."""

    def __init__(self, *where: int) -> None:
        self.where, self.call = where, 0

    def generator(self) -> np.random.Generator:
        self.call += 1
        return np.random.default_rng([*self.where, self.call])


class Oracle:
    """Trains `model` as N ranks must.

    Args:
        model: a model that no engine has wrapped; its values are where training starts.
        optimizer: an `SGD` or `Adam`, of which only the hyperparameters are read, anew in each step.
        n: the number of ranks to play.

    Attributes:
        weights: every parameter by name. state: of each trained one, by name, then by the state's name; empty before
            the first step. gradients: of each trained one, what the last step updated by.
        losses: [rank][micro-batch] of the last step. norm: before clipping, of the last step that clipped.
    """

    def __init__(self, model: Module, optimizer: mz.Optimizer, n: int) -> None:
        model.materialise()
        self.model, self.optimizer, self.n = model, optimizer, n
        self.parameters = dict(model.named_parameters())
        self.weights: dict[str, Vector] = {name: np.array(to_host(p.data)) for name, p in self.parameters.items()}
        self.state: dict[str, dict[str, Vector]] = {}
        self.gradients: dict[str, Vector] = {}
        self.losses: list[list[float]] = []
        self.norm = math.nan
        self.steps = 0
        self.units = [names for names in layout(model) if self.parameters[names[0]].requires_grad]

    def step(
        self,
        loss: Loss,
        batches: Sequence[Sequence[Any]],
        *,
        examples: Sequence[Sequence[int]] | None = None,
        no_sync: bool | Sequence[bool] = False,
        clip: float | None = None,
    ) -> float | None:
        """One step.

        Args:
            loss: called as loss(model, batch), for each slice.
            batches: [rank][micro-batch], of any kind.
            examples: [rank][micro-batch]: how many examples the loss is the mean of; else slices weigh the same.
            no_sync: was `backward` called inside `engine.no_sync()`? True: each time but the last; or one per call.
            clip: the largest norm of the mean gradient.

        Returns the norm before clipping, None where nothing is clipped.
        """
        micros = len(batches[0])
        if isinstance(no_sync, bool):
            no_sync = [no_sync] * (micros - 1) + [False]
        self.losses = [[] for _ in range(self.n)]
        local: list[Any] = [None] * self.n  # by rank: a vector per unit
        held: Any = None
        count = 0
        for micro in range(micros):
            for rank in range(self.n):
                weight = 1 if examples is None else examples[rank][micro]
                fresh = self.slice_gradients(loss, batches[rank][micro], rank, micro, weight)
                local[rank] = fresh if local[rank] is None else list(map(added, local[rank], fresh))
                count += weight
            if not no_sync[micro]:
                total = [self.sum_over_ranks(list(vectors)) for vectors in zip(*local, strict=True)]
                held = total if held is None else list(map(added, held, total))
                local = [None] * self.n
        held = [self.mean(vector, count) for vector in held]
        if clip is not None:
            self.norm = self.norm_of(held)
            if self.norm > clip:
                held = [divided(vector, self.norm / clip) for vector in held]
        self.steps += 1
        for names, vector in zip(self.units, held, strict=True):
            for name, part in self.split(names, vector):
                self.gradients[name] = part.reshape(self.weights[name].shape)
                self.update(name)
                self.parameters[name].bind(xp.asarray(self.weights[name]))
        return None if clip is None else self.norm

    def slice_gradients(self, loss: Loss, batch: Any, rank: int, micro: int, weight: int) -> list[Vector]:
        """One rank's gradients of one micro-batch: a vector for each unit, rounded to the unit's dtype."""
        noise = Noise(self.model.seed, rank, self.steps, micro)
        for _, module in self.model.named_modules():
            if hasattr(module, "noise"):
                module.noise = noise
        for parameter in self.parameters.values():
            parameter.grad = None
        result = loss(self.model, batch)
        self.losses[rank].append(result.item())
        result.backward(np.full(result.shape, weight, dtype=np.float64))
        vectors = []
        for names in self.units:
            size = sum(self.weights[name].size for name in names)
            vector = np.zeros(-(-size // self.n) * self.n, self.weights[names[0]].dtype)
            for name, part in self.split(names, vector):
                gradient = self.parameters[name].grad
                if gradient is not None:
                    part[:] = to_host(gradient).reshape(-1).astype(part.dtype)
            vectors.append(vector)
        return vectors

    def split(self, names: list[str], vector: Vector) -> list[tuple[str, Vector]]:
        """The part of a unit's vector that belongs to each parameter, flat, as a view."""
        parts, start = [], 0
        for name in names:
            parts.append((name, vector[start : start + self.weights[name].size]))
            start += self.weights[name].size
        return parts

    def order(self, chunk: int) -> list[int]:
        """The ranks in the order in which they are added in this chunk: chunk + 1, chunk + 2, ..., chunk."""
        return [(chunk + 1 + i) % self.n for i in range(self.n)]

    def sum_over_ranks(self, vectors: list[Vector]) -> Vector:
        chunks = [np.split(vector, self.n) for vector in vectors]  # [rank][chunk]
        sums = []
        for chunk in range(self.n):
            first, *others = self.order(chunk)
            total = chunks[first][chunk]
            for rank in others:
                total = added(total, chunks[rank][chunk])
            sums.append(total)
        return np.concatenate(sums)

    def mean(self, vector: Vector, count: int) -> Vector:
        return divided(vector, count)

    def norm_of(self, vectors: list[Vector]) -> float:
        """One float64 sum of squares for each (parameter, chunk), in blocks; then all of them exactly, and the root."""
        sums = []
        for names, vector in zip(self.units, vectors, strict=True):
            chunk_of = np.arange(vector.size) // max(vector.size // self.n, 1)
            for (_, part), (_, chunks) in zip(self.split(names, vector), self.split(names, chunk_of), strict=True):
                for chunk in range(self.n):
                    squares = part[chunks == chunk].astype(np.float64) ** 2
                    total, step = 0.0, block_size(squares.size)
                    for start in range(0, squares.size, step):
                        total += float(squares[start : start + step].sum())
                    sums.append(total)
        return math.sqrt(math.fsum(sums))

    def update(self, name: str) -> None:
        """The optimizer, on one whole tensor."""
        optimizer, weights = self.optimizer, self.weights[name]
        state = self.state.setdefault(name, {})
        if optimizer.master and weights.dtype == bfloat16:
            state.setdefault("master", wide(weights))
        w, g = state.get("master", wide(weights)), wide(self.gradients[name])
        zeros = np.zeros(w.shape, w.dtype)
        if isinstance(optimizer, mz.Adam):
            (beta1, beta2), lr = optimizer.betas, optimizer.lr
            state["exp_avg"] = m = np.asarray(state.get("exp_avg", zeros) * beta1 + g * (1 - beta1))
            state["exp_avg_sq"] = v = np.asarray(state.get("exp_avg_sq", zeros) * beta2 + g * (1 - beta2) * g)
            root = math.sqrt(1 - beta2**self.steps)
            rate = lr * root / (1 - beta1**self.steps)
            w = w * (1 - lr * optimizer.weight_decay) - m / (np.sqrt(v) + optimizer.eps * root) * rate
        elif isinstance(optimizer, mz.SGD):
            if optimizer.momentum:
                g = state["momentum_buffer"] = np.asarray(state.get("momentum_buffer", zeros) * optimizer.momentum + g)
            w = w - g * optimizer.lr
        else:
            raise TypeError(f"there is no formula here for {type(optimizer).__name__}")
        if "master" in state:
            state["master"] = np.asarray(w)
        self.weights[name] = np.asarray(w).astype(weights.dtype)


def bits(x: Vector) -> Vector:
    """The array's elements as unsigned integers, flat."""
    return np.ascontiguousarray(x).reshape(-1).view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


def differing(x: Vector, y: Vector) -> int:
    """How many elements of two arrays differ in their bits. (-0.0 is not 0.0; a NaN equals a NaN of the same bits.)"""
    assert x.shape == y.shape and x.dtype == y.dtype, f"{x.dtype} {x.shape} is not {y.dtype} {y.shape}"
    return int((bits(x) != bits(y)).sum())


def same_bits(x: Vector, y: Vector) -> bool:
    """Are shape, dtype and every bit the same?"""
    return x.shape == y.shape and x.dtype == y.dtype and differing(x, y) == 0
