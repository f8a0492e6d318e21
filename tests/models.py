"""Small models, ordinary and odd, each with batches that train it.

problem = PROBLEMS["gpt tied"]
model = problem.build(seed=0, dtype="bfloat16")
batch = problem.draw(numpy_generator, 3)           # 3 examples; 0 is allowed
loss = problem.loss(engine_or_model, batch)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minizero import functional as F
from minizero import nn
from minizero.autograd import Tensor
from minizero.backend import dtype_of, working, xp
from minizero.nn import Module, Parameter, constant, normal

IN, OUT = 6, 5  # features in, classes out, of all models on vectors
VOCAB, CONTEXT = 13, 6


class Batch(NamedTuple):
    inputs: tuple[Any, ...]  # what the model is called with
    targets: Any


class Problem(NamedTuple):
    name: str
    make: Callable[[Any], Module]  # dtype -> model
    tokens: bool = False

    def build(self, seed: int = 0, dtype: Any = "float32") -> Module:
        """A new model. Its dtype is that of most of its parameters; nothing is drawn yet."""
        model = self.make(dtype)
        model.seed = seed
        return model

    def draw(self, generator: np.random.Generator, examples: int, dtype: Any = "float32") -> Batch:
        """A random batch for a model of `dtype`."""
        if self.tokens:
            return Batch(
                (xp.asarray(generator.integers(0, VOCAB, (examples, CONTEXT))),),
                xp.asarray(generator.integers(0, VOCAB, (examples, CONTEXT))),
            )
        x = generator.standard_normal((examples, IN)).astype(working(dtype_of(dtype)))
        return Batch((xp.asarray(x),), xp.asarray(generator.integers(0, OUT, examples)))

    def loss(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch.inputs), batch.targets)


def joined(batches: list[Batch]) -> Batch:
    """All examples of several batches in one."""
    count = len(batches[0].inputs)
    return Batch(
        tuple(xp.concatenate([batch.inputs[i] for batch in batches]) for i in range(count)),
        xp.concatenate([batch.targets for batch in batches]),
    )


class Chain(Module):
    """Children `a`, `b`, `c`, each a unit, one after another with tanh between."""

    def __init__(self, a: Module, b: Module, c: Module) -> None:
        self.a, self.b, self.c = a, b, c

    def forward(self, x: Any) -> Tensor:
        return self.c(F.tanh(self.b(F.tanh(self.a(x)))))


class Residual(Module):
    """x + inner(x)."""

    def __init__(self, inner: Module) -> None:
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def shared_layer(dtype: Any) -> Module:
    """One whole layer in two units, and the weight of another in two units: three of them in the root unit."""
    layer = nn.Linear(7, 7, dtype=dtype)
    first, last = nn.Linear(IN, 7, dtype=dtype), nn.Linear(7, OUT, dtype=dtype)
    b = nn.Sequential(Residual(layer), nn.Linear(7, 7, dtype=dtype), Residual(layer), nn.Linear(7, 7, dtype=dtype))
    c = nn.Sequential(Residual(layer), nn.Linear(7, 7, bias=False, dtype=dtype), last)
    c.layers[1].weight = b.layers[1].weight  # type: ignore[attr-defined]
    return Chain(first, b, c)


def frozen(module: Module, *names: str) -> Module:
    """`module` with the parameters of these names (or all) frozen."""
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad = False
    return module


def frozen_between(dtype: Any) -> Module:
    """A frozen layer between trained ones, and a layer of which only the bias is trained."""
    return Chain(
        nn.Linear(IN, 9, dtype=dtype),
        frozen(nn.Linear(9, 8, dtype=dtype)),
        nn.Sequential(frozen(nn.Linear(8, 7, dtype=dtype), "weight"), nn.Linear(7, OUT, dtype=dtype)),
    )


class Skipping(Module):
    """Three layers; the middle one is left out where `model(x, True)` says so (in the model `skipped`, always)."""

    def __init__(self, dtype: Any, always: bool) -> None:
        self.always = always
        self.first, self.middle = nn.Linear(IN, 7, dtype=dtype), nn.Linear(7, 7, dtype=dtype)
        self.last = nn.Linear(7, OUT, dtype=dtype)

    def forward(self, x: Any, skip: bool = False) -> Tensor:
        x = F.tanh(self.first(x))
        if not (skip or self.always):
            x = F.tanh(self.middle(x))
        return self.last(x)


class Twice(Module):
    """y = f(f(x))"""

    def __init__(self, dtype: Any) -> None:
        self.first, self.f = nn.Linear(IN, 7, dtype=dtype), nn.Linear(7, 7, dtype=dtype)
        self.last = nn.Linear(7, OUT, dtype=dtype)

    def forward(self, x: Any) -> Tensor:
        return self.last(F.tanh(self.f(F.tanh(self.f(F.tanh(self.first(x)))))))


class Oddments(Module):
    """Parameters of shapes (0,), (width, 0), () and (1,), in a given order, around a square weight."""

    def __init__(self, width: int, order: str, dtype: Any) -> None:
        shapes = {"none": (0,), "flat": (width, 0), "scalar": (), "one": (1,), "weight": (width, width)}
        for name in order.split():
            setattr(self, name, Parameter(shapes[name], normal(0.4 if name == "weight" else 0.05), dtype))

    def forward(self, x: Tensor) -> Tensor:
        members = vars(self)
        x = x @ members["weight"] + members["one"]
        x = x * (members["scalar"] + 1.0)
        return x + (x @ members["flat"]).sum() + members["none"].sum()


class Leaf(Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def odd_shapes(dtype: Any) -> Module:
    return nn.Sequential(
        nn.Linear(IN, 8, dtype=dtype),
        Oddments(8, "none flat scalar one weight", dtype),
        Leaf(),
        Oddments(8, "one none weight flat scalar", dtype),
        F.tanh,
        Oddments(8, "scalar weight one flat none", dtype),
        nn.Linear(8, OUT, dtype=dtype),
    )


class Holder(Module):
    """A model that holds parameters itself, beside a child and a list of them; they are the root unit."""

    def __init__(self, dtype: Any) -> None:
        self.scale, self.shift = Parameter((IN,), normal(1.0), dtype), Parameter((OUT,), normal(1.0), dtype)
        self.layer = nn.Linear(IN, 7, dtype=dtype)
        self.matrices = [Parameter((7, 7), normal(0.3), dtype), Parameter((7, OUT), normal(0.3), dtype)]

    def forward(self, x: Any) -> Tensor:
        x = F.tanh(self.layer(F.mul(x, self.scale)))
        for matrix in self.matrices:
            x = F.tanh(x @ matrix)
        return x + self.shift


class Product(Module):
    """A user's own `x @ self.w.T`, and rows taken one by one."""

    def __init__(self, inputs: int, outputs: int, dtype: Any) -> None:
        self.w, self.b = Parameter((outputs, inputs), normal(0.3), dtype), Parameter((2, outputs), normal(0.3), dtype)

    def forward(self, x: Any) -> Tensor:
        return F.matmul(x, self.w.T) * self.b[0] + self.b[1]


def own_product(dtype: Any) -> Module:
    return Chain(Product(IN, 7, dtype), Product(7, 7, dtype), Product(7, OUT, dtype))


def two_dtypes(dtype: Any) -> Module:
    """float32 layer norms in the units of layers of `dtype`. (A float64 model stays float64: they do not mix.)"""
    norm = working(dtype_of(dtype))
    return Chain(
        nn.Sequential(nn.Linear(IN, 7, dtype=dtype), nn.LayerNorm(7, dtype=norm)),
        nn.Sequential(nn.LayerNorm(7, dtype=norm), nn.Linear(7, 7, dtype=dtype), nn.LayerNorm(7, dtype=norm)),
        nn.Linear(7, OUT, dtype=dtype),
    )


def gpt(dtype: Any, tied: bool = True, dropout: float = 0.0) -> Module:
    """A GPT whose first values are large enough for every gradient to be large, and small enough to move in bfloat16,
    where a gain of 1.0 needs an update of 0.002. (What a key's bias adds to all scores of a query alike, softmax takes
    away again: its true gradient is zero. It gets rounding errors, and moves from zero by them.)"""
    model = nn.GPT(vocab=VOCAB, context=CONTEXT, width=8, heads=2, layers=2, tied=tied, dropout=dropout, dtype=dtype)
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-1]
        parameter.init = {"weight": normal(0.7), "gain": constant(0.5), "bias": constant(0)}[kind]
    return model


def dropping(dtype: Any) -> Module:
    return nn.Sequential(
        nn.Linear(IN, 11, dtype=dtype), nn.Dropout(0.3), F.tanh, nn.Linear(11, 9, dtype=dtype), nn.Dropout(0.2),
        nn.Linear(9, OUT, dtype=dtype),
    )  # fmt: skip


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("mlp", lambda dtype: nn.MLP([IN, 13, 7, OUT], dtype=dtype)),
        Problem("gpt tied", gpt, tokens=True),
        Problem("gpt untied", lambda dtype: gpt(dtype, tied=False), tokens=True),
        Problem("gpt dropout", lambda dtype: gpt(dtype, dropout=0.2), tokens=True),
        Problem("dropout", dropping),
        Problem("shared", shared_layer),
        Problem("frozen", frozen_between),
        Problem("skipped", lambda dtype: Skipping(dtype, always=True)),
        Problem("skipping", lambda dtype: Skipping(dtype, always=False)),
        Problem("twice", Twice),
        Problem("odd shapes", odd_shapes),
        Problem("holder", Holder),
        Problem("own product", own_product),
        Problem("two dtypes", two_dtypes),
        Problem("one layer", lambda dtype: nn.Linear(IN, OUT, dtype=dtype)),  # the model itself is the only unit
        Problem("wide", lambda dtype: nn.MLP([IN, 1301, 13, OUT], dtype=dtype)),  # units of more than 16,384 elements
    )
}
