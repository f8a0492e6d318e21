"""How do parameters become layers, and layers the `MLP` and `GPT` that the lessons train?

Shapes: B examples (batch), T tokens (time), C channels (width), H heads, V words in the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from . import functional as F
from .autograd import Tensor
from .backend import xp
from .parameter import Init as Init
from .parameter import Parameter as Parameter
from .parameter import constant as constant
from .parameter import normal as normal
from .parameter import uniform as uniform

Piece = tuple[list[str], list[Callable[[Any], Tensor]]]  # of a model: paths of modules, and functions in a row


class Noise:
    """Where dropout's random numbers come from: (seed, rank, step, micro-batch, call), drawn on the host.

    An engine gives all layers of its model one `Noise` and keeps its counters.
    """

    def __init__(self, seed: int = 0, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank
        self.step = self.micro_batch = self.call = 0

    def at(self, step: int, micro_batch: int) -> None:
        self.step, self.micro_batch, self.call = step, micro_batch, 0

    def generator(self) -> np.random.Generator:
        """A fresh generator for the next call."""
        self.call += 1
        return np.random.default_rng([self.seed, self.rank, self.step, self.micro_batch, self.call])


class Module:
    """A part of a model: parameters and further modules in its attributes (also in lists, tuples and dicts).

    Subclasses write `forward`. `seed` (of the outermost module) is where parameters are drawn from.
    """

    seed = 0
    whole = ""  # of a part of a model: what the whole is, for comparison with the other parts
    training = True
    around: Callable[[], AbstractContextManager[None]] | None = None  # an engine's: entered around each forward
    _materialised = False

    def forward(self, *args: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any) -> Tensor:
        if not self._materialised:
            self.materialise()
        if self.around is None:
            return self.forward(*args)
        with self.around():
            return self.forward(*args)

    def _members(self, kind: type) -> Iterator[tuple[str, Any]]:
        todo: list[tuple[str, Any]] = list(reversed(vars(self).items()))
        while todo:
            name, value = todo.pop()
            if isinstance(value, kind):
                yield name, value
            elif isinstance(value, list | tuple | dict):
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                todo.extend(reversed([(f"{name}.{key}", item) for key, item in pairs]))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, each once, with their paths."""
        seen: set[int] = set()
        todo: list[tuple[str, Module]] = [(prefix, self)]
        while todo:
            path, module = todo.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                children = [(f"{path}.{name}".strip("."), child) for name, child in module._members(Module)]
                todo.extend(reversed(children))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, each once (a shared one under its first path)."""
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, parameter in module._members(Parameter):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{name}".strip("."), parameter

    def parameters(self) -> list[Parameter]:
        """All parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def units(self) -> list[tuple[str, Module]]:
        """The modules that are reduced, and under ZeRO-3 gathered, at once; with names, in order of use.

        Each direct child with parameters is one; so is each block of a list of blocks. Override it to choose.
        """
        children: dict[Module, str] = {}
        for name, child in self._members(Module):
            children.setdefault(child, name)  # one that is used again has its first place
        return [(name, child) for child, name in children.items() if child.parameters()]

    def pieces(self) -> list[Piece]:
        """The forward as a chain that a pipeline may cut: paths of the modules in each piece, and what it does."""
        raise NotImplementedError(f"{type(self).__name__} has no `pieces`, which say where a pipeline may cut it")

    def name_parameters(self) -> None:
        """Tell each parameter its path, and each module that the model's values exist or will be given."""
        named = list(self.named_parameters())
        twice = [path for path, times in Counter(path for path, _ in named).items() if times > 1]
        if twice:
            raise ValueError(f"two parameters are called {twice[0]}: rename an attribute, or a key of a dict")
        for path, parameter in named:
            parameter.name = path
        for _, module in self.named_modules():
            module._materialised = True

    def materialise(self) -> None:
        """Draw all parameters that have no values yet. For a model without engine; engines draw unit by unit."""
        self.name_parameters()
        for parameter in self.parameters():
            if parameter._data is None:
                flat = xp.empty(parameter.size, parameter.dtype)
                parameter.fill(flat, self.seed)
                parameter.bind(flat.reshape(parameter.shape))

    def train(self, training: bool = True) -> None:
        """Training behaviour from now on, here and below (dropout acts)."""
        for _, module in self.named_modules():
            module.training = training

    def eval(self) -> None:
        """Evaluation behaviour from now on, here and below (dropout does nothing)."""
        self.train(False)


class Linear(Module):
    """x @ weight.T + bias, with weight (outputs, inputs) and bias (outputs,) or none."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, dtype: Any = "float32", init: Init | None = None
    ) -> None:
        bound = uniform(1 / math.sqrt(max(inputs, 1)))
        self.weight = Parameter((outputs, inputs), init or bound, dtype)
        self.bias = Parameter((outputs,), constant(0) if init else bound, dtype) if bias else None

    def forward(self, x: Any) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Row `token` of weight (count, width), for each token."""

    def __init__(self, count: int, width: int, dtype: Any = "float32", init: Init | None = None) -> None:
        self.weight = Parameter((count, width), init or normal(1.0), dtype)

    def forward(self, tokens: Any) -> Tensor:
        return F.embedding(self.weight, tokens)


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axis, then gain (width,) and bias (width,)."""

    def __init__(self, width: int, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.gain = Parameter((width,), constant(1), dtype)
        self.bias = Parameter((width,), constant(0), dtype)
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.gain, self.bias, self.eps)


class Dropout(Module):
    """In training, each element is zero with probability p, and divided by 1 - p otherwise."""

    def __init__(self, p: float = 0.1) -> None:
        self.p = p
        self.noise = Noise()

    def forward(self, x: Any) -> Tensor:
        return F.dropout(x, self.p, self.noise.generator() if self.training and self.p else None)


class Sequential(Module):
    """Modules (or functions of one tensor, such as F.relu), one after another."""

    def __init__(self, *layers: Callable[[Any], Tensor], seed: int = 0) -> None:
        self.layers, self.seed = list(layers), seed

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def pieces(self) -> list[Piece]:
        return [([f"layers.{i}"] * isinstance(layer, Module), [layer]) for i, layer in enumerate(self.layers)]


class Whole:
    """How a model's products are built: each whole. tensor_parallel.py has another kind, which builds slices.

    Two layers in a row are a pair: the first is cut by its outputs, the columns, the second by its inputs, the rows.
    """

    def column(self, inputs: int, outputs: int, dtype: Any, init: Init | None = None, enter: bool = True) -> Linear:
        """The first of a pair. Several that share an input are built without `enter`, and the input enters once."""
        return Linear(inputs, outputs, dtype=dtype, init=init)

    def row(self, inputs: int, outputs: int, dtype: Any, init: Init | None = None) -> Linear:
        return Linear(inputs, outputs, dtype=dtype, init=init)

    def enter(self) -> Callable[[Tensor], Tensor]:
        return lambda x: x

    def heads(self, count: int) -> int:
        """How many of a layer's attention heads are here."""
        return count


class MLP(Module):
    """Linear layers of the given sizes with ReLU between: x (..., sizes[0]) -> (..., sizes[-1]).

    `split` builds them, in pairs; the last one of an odd number is whole.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0, dtype: Any = "float32", split: Whole | None = None) -> None:
        if len(sizes) < 2:
            raise ValueError(f"MLP needs at least an input and an output size, got {list(sizes)}")
        self.seed, split = seed, split or Whole()
        pairs, alone = divmod(len(sizes) - 1, 2)
        builders = [*[split.column, split.row] * pairs, *[Whole().column] * alone]
        self.layers = [build(*shape, dtype) for build, shape in zip(builders, itertools.pairwise(sizes), strict=True)]

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

    def pieces(self) -> list[Piece]:
        found: list[Piece] = [([f"layers.{i}"], [layer, F.relu]) for i, layer in enumerate(self.layers)]
        found[-1][1].pop()
        return found


class CausalSelfAttention(Module):
    """Each token looks at itself and the tokens before it: x (B, T, C) -> (B, T, C). `split` has H heads here."""

    def __init__(self, width: int, heads: int, dtype: Any = "float32", split: Whole | None = None) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"attention: width {width} is not a multiple of {heads} heads")
        split = split or Whole()
        self.heads, self.size, self.enter = split.heads(heads), width // heads, split.enter()
        init = normal(0.02)
        self.query, self.key, self.value = (split.column(width, width, dtype, init, enter=False) for _ in range(3))
        self.out = split.row(width, width, dtype, init)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        x = self.enter(x)
        q, k, v = (  # each (B, H, T, C/heads)
            layer(x).reshape(b, t, self.heads, self.size).transpose(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(self.size))  # (B, H, T, T)
        past = xp.tril(xp.ones((t, t), dtype=bool))
        weights = F.softmax(F.where(past, scores, -1e30))
        return self.out((weights @ v).transpose(0, 2, 1, 3).reshape(b, t, self.heads * self.size))


class Block(Module):
    """One transformer block: attention, then a feed-forward of 4C, each added to its normalised input."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, dtype: Any = "float32",
                 split: Whole | None = None) -> None:  # fmt: skip
        split = split or Whole()
        self.norm1, self.norm2 = LayerNorm(width, dtype=dtype), LayerNorm(width, dtype=dtype)
        self.attention = CausalSelfAttention(width, heads, dtype, split)
        self.up = split.column(width, 4 * width, dtype, normal(0.02))
        self.down = split.row(4 * width, width, dtype, normal(0.02))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(Module):
    """A decoder-only transformer: integer tokens (B, T), T <= context -> logits (B, T, V).

    `tied`: the output projection is the embedding's own weight. It is then one parameter, in the root unit.
    `split` builds the linear layers of its blocks.
    """

    def __init__(self, *, vocab: int, context: int, width: int, heads: int, layers: int, tied: bool = True,
                 dropout: float = 0.0, seed: int = 0, dtype: Any = "float32",
                 split: Whole | None = None) -> None:  # fmt: skip
        self.seed, self.context = seed, context
        self.token = Embedding(vocab, width, dtype, init=normal(0.02))
        self.position = Embedding(context, width, dtype, init=normal(0.02))
        self.blocks = [Block(width, heads, dropout, dtype, split) for _ in range(layers)]
        self.norm = LayerNorm(width, dtype=dtype)
        self.head = Linear(width, vocab, bias=False, dtype=dtype, init=normal(0.02))
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, tokens: Any) -> Tensor:
        shape = tuple(tokens.shape) if hasattr(tokens, "shape") else np.shape(tokens)
        if len(shape) != 2 or not shape[1]:
            raise ValueError(f"GPT: tokens must be (batch, time), with at least one in time, not {shape}")
        time = shape[1]
        if time > self.context:
            raise ValueError(f"GPT: {time} tokens in a row, but its context is {self.context}")
        return self.token(tokens) + self.position(np.arange(time))  # (B, T, C) + (T, C)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def pieces(self) -> list[Piece]:
        """A block each; the first one with the embeddings, the last one with the output."""
        found: list[Piece] = [([f"blocks.{i}"], [block]) for i, block in enumerate(self.blocks)] or [([], [])]
        (first, functions), (last, more) = found[0], found[-1]
        first[:0], functions[:0] = ["token", "position"], [self.embed]
        last += ["norm", "head"]
        more += [self.logits]
        return found
