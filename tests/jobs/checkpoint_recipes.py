"""What the checkpoint jobs train: every dtype, dropout, frozen, tied and empty weights, both optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn

VOCAB, CONTEXT, EXAMPLES, BATCH = 11, 6, 22, 8
Arrays = dict[str, np.ndarray[Any, Any]]


def gpt() -> nn.Module:
    model = nn.GPT(vocab=VOCAB, context=CONTEXT, width=12, heads=3, layers=1, dtype="bfloat16", dropout=0.1, seed=3)
    model.position.weight.requires_grad = False
    return model


class Mixed(nn.Module):
    """float32, float64, bfloat16, frozen, unused and empty parameters, in units that no N of the tests divides."""

    seed = 5

    def __init__(self) -> None:
        self.first = nn.Linear(CONTEXT, 7, dtype="float32")
        self.rest = {"norm": nn.LayerNorm(7), "drop": nn.Dropout(0.25), "last": nn.Linear(7, VOCAB, dtype="bfloat16")}
        self.unused = nn.Linear(1, 3, dtype="float64")
        self.scale = nn.Parameter((), nn.constant(1.5), dtype="float64")
        self.empty = nn.Parameter((0, 3), nn.constant(1))
        self.fixed = nn.Parameter((5,), nn.normal(1), requires_grad=False)

    def forward(self, tokens: Any) -> Any:
        x = self.first(np.asarray(tokens, "float32")) * self.scale.astype("float32")
        return self.rest["last"](self.rest["drop"](F.gelu(self.rest["norm"](x)))) + self.fixed.sum()


RECIPES: dict[str, tuple[Callable[[], nn.Module], Callable[[], mz.Optimizer]]] = {
    "gpt, adam": (gpt, lambda: mz.Adam(1e-2, weight_decay=0.1, master=True)),
    "mixed, adam": (Mixed, lambda: mz.Adam(3e-2)),
    "mixed, sgd": (Mixed, lambda: mz.SGD(0.05, momentum=0.9, master=True)),
    "gpt, plain sgd": (gpt, lambda: mz.SGD(4.0)),
}


class Loader:
    """Epochs in an order drawn anew; `state` and `restore` say where in one it stands."""

    def __init__(self) -> None:
        self.generator, self.at = np.random.default_rng(0), 0
        self.order: list[int] = []
        self.data = np.random.default_rng(1).integers(0, VOCAB, (EXAMPLES, CONTEXT))

    def state(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state, "order": self.order, "at": self.at}

    def restore(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.order, self.at = state["order"], state["at"]

    def batch(self) -> np.ndarray[Any, Any]:
        """The next examples: an epoch's last batch is short."""
        if self.at >= len(self.order):
            self.order, self.at = self.generator.permutation(EXAMPLES).tolist(), 0
        rows, self.at = self.order[self.at : self.at + BATCH], self.at + BATCH
        return self.data[rows]


def train(engine: mz.Engine, loader: Loader, steps: int, k: int = 1) -> None:
    """So many steps of k micro-batches on this rank's slices, with clipping."""
    for _ in range(steps):
        for part in np.array_split(loader.batch(), k):
            mine = np.array_split(part, engine.comm.size)[engine.comm.rank]
            out = engine(mine)
            targets = mine if out.ndim == 3 else mine[:, 0]
            engine.backward(F.cross_entropy(out, targets), examples=len(mine))
        engine.clip_grad_norm(1.0)
        engine.step()


def state_of(engine: mz.Engine) -> Arrays:
    """Weights and moments, whole. Collective."""
    moments = {f"{key} of {n}": a for n, s in engine.gather_optimizer_state().items() for key, a in s.items()}
    return {**engine.gather_parameters(), **moments}


def differences(one: Arrays, two: Arrays) -> list[str]:
    """The names whose arrays are not the same bits."""
    names = dict.fromkeys([*one, *two])
    return [
        n for n in names
        if n not in one or n not in two or (one[n].dtype, one[n].shape, one[n].tobytes()) != (
            two[n].dtype, two[n].shape, two[n].tobytes())
    ]  # fmt: skip


def digest(folder: Path) -> dict[str, str]:
    """A hash of each file of a checkpoint."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def engines(recipe: str, comm: mz.Communicator) -> Iterator[mz.Engine]:
    """A fresh engine of each stage."""
    model, optimizer = RECIPES[recipe]
    return (stage(model(), optimizer(), comm) for stage in mz.STAGES)
