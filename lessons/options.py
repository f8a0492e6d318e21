"""What is trained? The options of a lesson's command line, the model that they describe, and its data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import data
import minizero as mz
import pictures
from minizero import backend, nn, plan
from minizero.comm import MPI

CONTEXT = 32  # characters that the GPT looks back on
PLOT = (
    "draw two pictures: FILE-step, the memory of one step over time (the third; recording it takes a moment), and "
    "FILE-rest, the bytes per parameter at rest. FILE ends in .png or .svg, or in neither, which writes both"
)


class Parser(argparse.ArgumentParser):
    """All ranks read the same options and end together; only rank 0 speaks."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """A type for argparse: a number within limits."""

    def parse(given: str) -> Any:
        if not low <= kind(given) <= high:
            raise argparse.ArgumentTypeError(f"{given} does not lie in {low:,} to {high:,}")
        return kind(given)

    parse.__name__ = "number" if kind is float else "whole number"
    return parse


def size(given: str) -> str:
    """A type for argparse: bytes, as `plan.parse_bytes` reads them."""
    try:
        plan.parse_bytes(given)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None
    return given


class Task:
    """What is trained: the options of the command line, the model that they describe, and its data."""

    budget: str | None = None
    plot: str | None = None

    def __init__(self, doc: str | None, micro_batches: bool = True) -> None:
        parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        add, count = parser.add_argument, number(int, 1, 1_000_000)
        add("--model", choices=("mlp", "gpt"), default="mlp", help="mlp reads digits; gpt learns the lessons' own text")
        steps = number(int, 2, 1_000_000)
        add("--steps", type=steps, default=60, help="at least 2: moments exist from the second on (60)")
        add("--width", type=count, help="channels of a layer (mlp 128, gpt 64)")
        add("--layers", type=count, help="linear layers of the mlp (4), blocks of the gpt (2)")
        add("--batch", type=number(int, 1, data.TRAIN), help="examples per step, over all ranks (mlp 480, gpt 48)")
        add("--lr", type=number(float, 1e-9, 1e3), help="Adam's learning rate (mlp 0.005, gpt 0.002)")
        add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and gradients (bfloat16)")
        if micro_batches:  # where there is an engine
            add("--micro-batches", type=count, default=1, help="k: backwards per step, each on 1/k of the batch (1)")
            add("--plot", metavar="FILE", help=PLOT)
            add(
                "--save",
                metavar="DIR",
                help="save each stage in DIR/STAGE, every 10 steps and at the end (do not save)",
            )
            add(
                "--resume",
                metavar="DIR",
                help="go on with what --save DIR saved, up to step --steps; DIR/DP: every stage with DP's",
            )
            add("--budget", type=size, help="memory of a rank, as in 500kB or 2MB; out of it, the run ends (no limit)")
        add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of weights and batches (0)")
        add("--json", action="store_true", help="print one JSON object, and nothing else")
        self.options = options = parser.parse_args()
        self.plot, self.budget = getattr(options, "plot", None), getattr(options, "budget", None)
        self.check_plot(parser)
        usual = {"mlp": (128, 4, 480, 5e-3), "gpt": (64, 2, 48, 2e-3)}[options.model]
        for name, value in zip(("width", "layers", "batch", "lr"), usual, strict=True):
            setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
        self.width, self.layers, self.batch, self.lr = options.width, options.layers, options.batch, options.lr
        self.steps, self.k = options.steps, getattr(options, "micro_batches", 1)
        self.itemsize = backend.dtype_of(options.dtype).itemsize
        self.x: Any  # to train on: pixels (1500, 64), or characters (windows, CONTEXT)
        self.test_x: Any
        if options.model == "mlp":
            self.x, self.y, self.test_x, self.test_y = data.digits()
            return
        try:
            x, y, self.vocabulary = data.text(CONTEXT)
        except ValueError as reason:
            parser.error(str(reason))
        cut = len(x) * 9 // 10  # the windows that test lie side by side behind all that train
        self.x, self.y, rest = x[:cut], y[:cut], slice(cut + CONTEXT, None, CONTEXT)
        self.test_x, self.test_y = x[rest], y[rest]

    def check_plot(self, parser: Parser) -> None:
        """End where --plot cannot be done: before the training, not after it. Collective; rank 0 draws, and looks."""
        if self.plot is not None:
            refusal = pictures.refusal(self.plot) if MPI.COMM_WORLD.rank == 0 else ""
            if refusal := MPI.COMM_WORLD.bcast(refusal):
                parser.error(refusal)

    def model(self, layers: int | None = None) -> nn.Module:
        """The model, with no values yet; `layers` in place of --layers."""
        o, layers = self.options, layers or self.layers
        if o.model == "mlp":
            return nn.MLP([64, *[self.width] * (layers - 1), 10], seed=o.seed, dtype=o.dtype)
        return nn.GPT(vocab=len(self.vocabulary), context=CONTEXT, width=self.width, layers=layers,
                      heads=1 if self.width % 4 else 4, seed=o.seed, dtype=o.dtype)  # fmt: skip

    def title(self, ranks: int) -> str:
        """What is trained, in a few words, on how many ranks."""
        o, layers = self.options, "layers" if self.options.model == "mlp" else "blocks"
        batch = f"batch {self.batch}{f' in {self.k} micro-batches' if self.k > 1 else ''}"
        return f"N = {ranks}, {o.dtype}, {o.model} of {self.layers} {layers}, width {self.width}, {batch}"

    def batches(self, rank: int = 0, size: int = 1, first: int = 0) -> Iterator[list[tuple[Any, Any]]]:
        """For each step from `first` on the micro-batches (x, y) of one rank's slice of the global batch."""
        for x, y in data.batches(self.x, self.y, self.batch, range(first, self.steps), rank, size, self.options.seed):
            yield list(zip(np.array_split(x, self.k), np.array_split(y, self.k), strict=True))

    def accuracy(self, forward: Callable[[Any], mz.Tensor]) -> float:
        """The part of the test set, which no step has seen, that the model gets right. Collective."""
        with mz.no_grad():
            best = backend.to_host(forward(self.test_x).data.argmax(-1))
        return float((best == self.test_y).mean())
