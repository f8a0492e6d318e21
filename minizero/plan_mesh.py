"""What does a rank hold and send, if tensor and pipeline parallelism have cut the model before?

    python -m minizero plan --params 13e9 --dp 2 --pp 2 --tp 2

A rank then has 1/(pp * tp) of the model, and does the same as dp - 1 others. All that plan.py says of N ranks holds for
these dp, with the part in place of the whole. With --gpt, parts are not equal: the slices of each layer are, but what
is not cut is held tp times, the first stage has the embeddings and the most micro-batches alive (under 1F1B), the last
one the output. The stage that needs the most is shown.

Sent by a rank per step of k micro-batches, where V are the bytes of an activation of one: (B, T, C) in float32

    tp    per block 4 all-reduces, two forward and two backward: 8k V(tp-1)/tp
    pp    V to the right and V to the left, if there are both neighbours: 2k V
    dp    2k, 2k+1, k+1, 3k Ψ(dp-1)/dp; with gradients accumulated on the rank until the last: 2, 3, 2, 2k+1
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import plan
from .plan import Recipe, format_bytes
from .sizes import FLOAT, Sizes

AXES = {"dp": "replicas, over which ZeRO shards", "pp": "stages of a pipeline", "tp": "slices of each layer"}
MANY = 1 << 20
Figures = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    for axis, what in AXES.items():
        parser.add_argument(f"--{axis}", metavar="N", help=f"in place of --ranks: {what} (1, if another one is given)")
    parser.add_argument("--micro-batches", metavar="K", help="backwards per step, each of which is reduced (1)")


def parse(options: argparse.Namespace) -> Mesh:
    """The mesh that is asked for; without one, ranks that all hold the whole model. Raises ValueError."""
    numbers = {}
    for name in (*AXES, "micro_batches"):
        text = getattr(options, name)
        if text is not None and not (text.isdigit() and 1 <= int(text) <= MANY):
            raise ValueError(f"--{name.replace('_', '-')} {text}: write a whole number of at least 1")
        numbers[name] = int(text or 1)
    given = any(getattr(options, axis) is not None for axis in AXES)
    if given and options.ranks is not None:
        raise ValueError("--ranks is dp times pp times tp: give it, or the three of them")
    return Mesh(**numbers, given=given)


@dataclass(frozen=True)
class Mesh:
    dp: int
    pp: int
    tp: int
    micro_batches: int
    given: bool

    def share(self, parameters: int) -> int:
        """A rank's part of so many parameters, if all parts are equal."""
        return -(-parameters // (self.pp * self.tp))

    def part(self, gpt: dict[str, Any], recipe: Recipe) -> Sizes:
        """The sizes of the stage that needs the most. Raises ValueError for what cannot be cut."""
        whole = plan.gpt(**gpt, tp=self.tp)
        stages = [whole.stage(i, self.pp, self.micro_batches) for i in range(self.pp)]
        return max(stages, key=lambda sizes: sum(plan.peaks(sizes, recipe, "DP", 1)["backward"].values()))

    def figures(self, sizes: Sizes | None, gpt: dict[str, Any] | None, recipe: Recipe) -> Figures:
        found: Figures = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "given": self.given,
                          "micro_batches": self.micro_batches, "live": sizes.live if sizes else 1}  # fmt: skip
        if not (sizes and gpt):
            return found
        time = gpt.get("time") or gpt["context"]
        activation = FLOAT * gpt["batch"] * time * gpt["width"] * recipe.wide // FLOAT
        blocks = sum(unit.name.startswith("blocks.") for unit in sizes.units)
        boundaries = 0 if self.pp == 1 else 1 if self.pp == 2 else 2
        found["units"] = [unit.name for unit in sizes.units]
        found["parameters"] = plan.gpt(**gpt).parameters
        found["sent"] = {"tp": 8 * self.micro_batches * blocks * activation * (self.tp - 1) // self.tp,
                         "pp": self.micro_batches * boundaries * activation}  # fmt: skip
        return found


def lines(figures: Figures) -> Iterator[str]:
    """Where a mesh is given: what a rank's part is."""
    mesh = figures["mesh"]
    if not mesh["given"]:
        return
    dp, pp, tp = (mesh[axis] for axis in AXES)
    units, part = mesh.get("units"), f"1/{pp * tp} of the model"
    if units is not None:
        part = f"{figures['parameters'] / mesh['parameters']:.2g} of the model's {mesh['parameters']:,}"
        part += f", by the stage that needs the most: {units[0]} to {units[-1]}" * (pp > 1)
    text = f"held by a rank on a mesh of dp {dp} × pp {pp} × tp {tp} = {dp * pp * tp:,} ranks: {part}"
    yield from textwrap.wrap(f"{text}. N below is dp: so many ranks hold the same.", 96)


def traffic_lines(figures: Figures) -> Iterator[str]:
    """What the other axes send, and what dp sends where gradients are accumulated on the rank."""
    mesh = figures["mesh"]
    k = mesh["micro_batches"]
    if k > 1:
        yield f"      if only their sum is reduced (no_sync): 2, 3, 2, {2 * k + 1}, and whole gradients are held"
    for axis, nbytes in mesh.get("sent", {}).items() if mesh["given"] else ():
        how = "all-reduces of activations" if axis == "tp" else "activations and their gradients"
        yield f"      by {axis}, whatever the stage: {format_bytes(nbytes)} a step, {how}"
