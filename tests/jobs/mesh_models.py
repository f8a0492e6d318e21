"""Small models and batches for meshes, their truth by one process alone, and the comparison of slices with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import minizero as mz
from minizero import functional as F
from minizero import nn, plan
from minizero.backend import to_host
from minizero.nn import constant, normal
from minizero.tensor_parallel import Slice
from oracle import Oracle, Vector

EXAMPLES = 32  # of a global batch: at dp = 8 one in each of four micro-batches; at 3, 5 and 7 slices are uneven
IN, CUT, OUT = 6, 24, 5  # features, what tensor parallelism cuts, and classes of the MLP
GPT: dict[str, Any] = {"vocab": 13, "context": 6, "width": 16, "heads": 4}
Batch = list[tuple[Vector, Vector]]  # micro-batches


class Problem(NamedTuple):
    """`layers`: those of an MLP, or blocks of a GPT. `tied`: is its embedding its output, too?"""

    kind: str
    layers: int
    tied: bool = False
    dropout: float = 0.0

    @property
    def widths(self) -> list[int]:
        """Of the MLP: what is cut, and what is not, in turn."""
        return [IN, *([CUT, 14] * 4)[: self.layers - 1], OUT]

    def model(self, dtype: str, split: nn.Whole | None = None) -> Any:
        """Without values yet. Initial values are so large that every gradient is."""
        if self.kind == "mlp":
            model: Any = nn.MLP(self.widths, dtype=dtype, split=split)
            for layer in model.layers:
                layer.weight.init, layer.bias.init = normal(0.45), normal(0.2)
            return model
        model = nn.GPT(**GPT, layers=self.layers, tied=self.tied, dropout=self.dropout, dtype=dtype, split=split)
        for name, parameter in model.named_parameters():
            kind = name.split(".")[-1]
            parameter.init = {"weight": normal(0.3), "gain": constant(0.8), "bias": normal(0.1)}[kind]
        return model

    def sizes(self, examples: int, tp: int, stage: int, stages: int) -> plan.Sizes:
        """What a rank should hold."""
        if self.kind == "mlp":
            return plan.mlp(self.widths, examples, tp).stage(stage, stages)
        whole = plan.gpt(**GPT, layers=self.layers, tied=self.tied, batch=examples, tp=tp)
        return whole.stage(stage, stages)

    def batch(self, step: int, dtype: str) -> tuple[Vector, Vector]:
        """A global batch."""
        generator = np.random.default_rng([step, self.layers])
        if self.kind == "gpt":
            shape = EXAMPLES, GPT["context"]
            return generator.integers(0, GPT["vocab"], shape), generator.integers(0, GPT["vocab"], shape)
        x = generator.standard_normal((EXAMPLES, IN)).astype("float32" if dtype == "bfloat16" else dtype)
        return x, generator.integers(0, OUT, EXAMPLES)

    def micro_batches(self, step: int, dtype: str, rank: int, ranks: int, k: int = 4) -> Batch:
        """The slice of one of so many data-parallel ranks."""
        x, y = (np.array_split(np.array_split(each, ranks)[rank], k) for each in self.batch(step, dtype))
        return list(zip(x, y, strict=True))


def loss_of(model: Any, batch: tuple[Vector, Vector]) -> mz.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Truth(NamedTuple):
    weights: dict[str, Vector]
    norms: list[float | None]
    losses: list[float]


def truth(problem: Problem, optimizer: mz.Optimizer, steps: int, clip: float | None) -> Truth:
    """What follows from the undivided batch, in float64. Every tensor moves, but for a key's bias, which cannot."""
    oracle = Oracle(problem.model("float64"), optimizer, 1)
    start, norms, losses = dict(oracle.weights), list[float | None](), list[float]()
    for step in range(steps):
        norms.append(oracle.step(loss_of, [[problem.batch(step, "float64")]], clip=clip))
        losses.append(oracle.losses[0][0])
    for name, x in oracle.weights.items():
        moved = np.abs(x - start[name]).max() / np.abs(x).max()
        assert moved > 1e-5 or name.endswith("key.bias"), f"{problem}: {name} has moved by {moved:.2g} of its value"
    return Truth(oracle.weights, norms, losses)


def slice_of(parameter: nn.Parameter, whole: Vector) -> Vector:
    """What a rank holds of a tensor."""
    if not isinstance(parameter, Slice):
        return whole
    i, n = parameter.part
    return np.split(whole, n, axis=parameter.axis)[i]


def errors(engine: mz.Engine, weights: dict[str, Vector]) -> dict[str, float]:
    """By parameter, the largest error over the largest value of the whole tensor. Collective over the group."""
    parameters, found = dict(engine.model.named_parameters()), {}
    for name, mine in engine.gather_parameters().items():
        if not name.endswith("key.bias"):  # its true gradient is zero
            wrong = np.abs(mine - slice_of(parameters[name], weights[name])).max()
            found[name] = float(wrong / np.abs(weights[name]).max())
    return found


def flat(engine: mz.Engine) -> dict[str, Vector]:
    """All weights and moments of this rank's part, whole. Collective over the engine's group."""
    state = engine.gather_optimizer_state().items()
    return {**engine.gather_parameters(), **{f"{n} ({k})": x for n, kept in state for k, x in kept.items()}}


def build(
    stage: type[mz.Engine],
    problem: Problem,
    optimizer: mz.Optimizer,
    mesh: mz.Mesh,
    dtype: str,
    pipeline: Callable[..., mz.Pipeline] = mz.Pipeline,
    **options: Any,
) -> mz.Pipeline:
    """A pipeline with an engine. Collective over the mesh."""
    model = mz.Stage(problem.model(dtype, mz.Split(mesh.tp)), mesh.pp)
    return pipeline(stage(model, optimizer, mesh.dp), mesh.pp, F.cross_entropy, **options)


def train(pipeline: mz.Pipeline, problem: Problem, step: int, dtype: str, k: int = 4) -> list[float]:
    """Forward and backward of one step; the losses, on the last stage."""
    group = pipeline.engine.comm
    batch = problem.micro_batches(step, dtype, group.rank, group.size, k)
    return [float(to_host(loss.data)) for loss in pipeline.backward(batch, [len(y) for _, y in batch])]
