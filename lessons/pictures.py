"""What does one step's memory look like, allocation by allocation, and what is held at rest?

    mpirun -n 8 python lessons/04_zero3.py --plot zero       writes zero-step.png, zero-rest.png and both as .svg

`recording` is a context around one step of a training as it is; what it saw becomes a `Step`. `step_figure` and
`rest_figure` draw, `draw` does both and writes the files. matplotlib is imported only where something is drawn.

    forward        backward          step                  each phase has the same width, and in it each allocation;
      ____        _/\\__/\\_                                 a height is the bytes held at an allocation, with those
    _/    \\______/        \\________/\\___                   that it asked for, by term
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import minizero as mz

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Terms = dict[str, int]
SUFFIXES = (".png", ".svg")
INSTALL = "--plot draws with matplotlib, which is not installed: pip install 'minizero[plot]'"
MB = 1_000_000  # bytes
WIDTH = 8.0  # inches of 100 pixels
COLORS = 64  # of a PNG, which makes it small
COLUMNS = 32  # of a phase, at most; a column shows its largest moment

# For each term, from the bottom up: face, hatch and its colour. Neighbours differ in lightness, and so in grayscale.
STYLES = {
    "weights": ("#24406b", "", "#24406b"),
    "gradients": ("#f2bd6b", "///", "#8a5a00"),
    "optimizer": ("#2c7563", "", "#2c7563"),
    "activations": ("#f4efc9", "---", "#b5ab6a"),
    "temporary": ("#d18fab", "\\\\\\", "#8c4766"),
    "other": ("#ffffff", "xxx", "#555555"),
}
SETTINGS = {
    "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "svg.fonttype": "none", "svg.hashsalt": "minizero", "hatch.linewidth": 0.6,
}  # fmt: skip


class Column(NamedTuple):
    """A piece of a picture: bytes by term, from left to right, in widths of a phase."""

    left: float
    right: float
    terms: Terms

    def span(self, term: str) -> tuple[float, float]:
        """From where to where the term is drawn, in MB: on top of all terms that come before it."""
        order = list(STYLES)
        below = sum(self.terms[each] for each in order[: order.index(term)])
        return below / MB, (below + self.terms[term]) / MB


class Step(NamedTuple):
    """What a rank held in one step: at each moment the phase, and the bytes by term."""

    name: str
    moments: list[tuple[str, Terms]]

    @property
    def largest(self) -> tuple[str, Terms]:
        """The moment at which the most was held."""
        return max(self.moments, key=lambda moment: sum(moment[1].values()))

    def bands(self) -> list[tuple[str, list[Terms]]]:
        """The moments of each phase: forward and backward for each micro-batch, then the step."""
        return [(phase, [terms for _, terms in run]) for phase, run in groupby(self.moments, key=lambda m: m[0])]

    def columns(self, most: int = COLUMNS) -> list[Column]:
        """What is drawn: each phase is 1 wide and has at most so many columns."""
        found = []
        for place, (_, moments) in enumerate(self.bands()):
            count = min(len(moments), most)
            cuts = [len(moments) * i // count for i in range(count + 1)]
            for i, (start, stop) in enumerate(pairwise(cuts)):
                largest = max(moments[start:stop], key=lambda terms: sum(terms.values()))
                found.append(Column(place + i / count, place + (i + 1) / count, largest))
        return found


@contextmanager
def recording(engine: mz.Engine, steps: list[Step], name: str) -> Iterator[None]:
    """Append to `steps` what this rank held for `engine` while the code inside ran, also if it failed."""
    from minizero import memory

    with memory.measure(engine, timeline=True) as seen:
        before = seen.terms()
        try:
            yield
        finally:
            steps.append(Step(name, in_phases([("", before), *seen.events, ("", seen.terms())])))


def in_phases(events: Sequence[tuple[str, Terms]]) -> list[tuple[str, Terms]]:
    """The same moments; those outside every phase count to the one before, or at the beginning to the one after."""
    phase = next((name for name, _ in events if name not in ("", "outside")), "outside")
    found = []
    for name, terms in events:
        phase = phase if name in ("", "outside") else name
        found.append((phase, terms))
    return found


class Rest(NamedTuple):
    """What a stage holds at rest, in bytes per parameter by term; no prediction for a stage of the reader's own."""

    name: str
    measured: dict[str, float]
    predicted: dict[str, float] | None


def files(file: str) -> dict[str, list[Path]]:
    """The names of both pictures that --plot FILE writes: FILE-step and FILE-rest, in each form."""
    path = Path(file)
    suffixes = [path.suffix] if path.suffix else SUFFIXES
    return {
        which: [path.with_name(f"{path.stem}-{which}{suffix}") for suffix in suffixes] for which in ("step", "rest")
    }


def refusal(file: str) -> str:
    """Why nothing could be drawn into this file, in a sentence; "" if all is well. Imports matplotlib."""
    path = Path(file)
    if not path.name or path.is_dir():
        return f"argument --plot: {file or '(nothing)'} is a directory: name a file"
    if path.suffix and path.suffix not in SUFFIXES:
        return f"argument --plot: cannot draw {path.suffix}: choose .png, .svg, or no suffix for both"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"argument --plot: {path.parent} is no directory that can be written to"
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return INSTALL if error.name == "matplotlib" else f"--plot: matplotlib cannot be imported: {error}"
    return ""


def draw(file: str, model: str, steps: Sequence[Step], rests: Sequence[Rest] = (), limit: int = 0) -> list[str]:
    """Write the two pictures, or with no `rests` the first; return the names of the files.

    `model` says ranks, dtype and model, for the titles. `limit`: of a budget, in bytes; 0 if there was none.
    """
    written = []
    for which, paths in files(file).items():
        if which == "rest" and not rests:
            continue
        with drawing():
            figure = step_figure(steps, model, limit) if which == "step" else rest_figure(rests, model)
            for path in paths:
                save(figure, path)
                written.append(str(path))
    return written


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, matplotlib draws as we want it, whatever the user's own settings are."""
    from matplotlib import style

    with style.context(["default", SETTINGS]):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a picture, small, and with nothing in it that changes from day to day."""
    from PIL import Image

    drawn = BytesIO()
    if path.suffix == ".svg":
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        path.write_text(re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", drawn.getvalue().decode()))
    else:
        figure.savefig(drawn, format="png")
        Image.open(drawn).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


def step_figure(steps: Sequence[Step], model: str, limit: int = 0) -> Figure:
    """One step's memory over time, stacked by term: a panel for each stage, all on one scale; a budget as a line."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, 4.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    top = 1.1 * max(limit, *(sum(step.largest[1].values()) for step in steps)) / MB
    for axes, step in zip(panels, steps, strict=True):
        axes.set_ylim(0, top)
        stack(axes, step.columns())
        mark(axes, step, limit)
        axes.set_title(step.name, fontsize=10)
    name_terms(panels[0], steps[0].columns(), top, 0.9 * WIDTH / len(steps))
    panels[0].set_ylabel("held on rank 0, in MB (10⁶ bytes)")
    initials = "" if len(steps[0].bands()) <= 3 else "; f forward, b backward, s step"
    order = f"the step's allocations in their order, each phase stretched to the same width{initials}"
    figure.supxlabel(order, fontsize=9)
    legend(figure, tuple(STYLES), f"One step's memory: {model}")
    return figure


def stack(axes: Axes, columns: Sequence[Column]) -> None:
    """Draw the terms on top of each other: the highest first, each down to 0, so that the next covers the rest."""
    for term in reversed([term for term in STYLES if any(column.terms[term] for column in columns)]):
        x, y, height = [columns[0].left], [0.0], 0.0
        for column in columns:
            _, now = column.span(term)
            if now != height:
                x, y, height = [*x, column.left, column.left], [*y, height, now], now
        axes.fill([*x, columns[-1].right, columns[-1].right], [*y, height, 0], **look(term), linewidth=0)


def mark(axes: Axes, step: Step, limit: int = 0) -> None:
    """The phases below, the largest moment, and a budget; what is above it was refused."""
    phases = [phase for phase, _ in step.bands()]
    shown = range(0, len(phases), 1 + len(phases) // 16)
    names = [phases[i] if len(phases) <= 3 else phases[i][0] for i in shown]
    axes.set_xlim(0, len(phases))
    axes.set_xticks([i + 0.5 for i in shown], names, fontsize=8)
    axes.tick_params(axis="x", length=0)
    for border in range(1, len(phases)):
        axes.axvline(border, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    column = max(step.columns(), key=lambda column: column.span("other")[1])
    height = column.span("other")[1]
    x = min(max((column.left + column.right) / 2, 0.2 * len(phases)), 0.8 * len(phases))
    digits = max(2 - math.floor(math.log10(height or 1)), 0)  # three that count
    text = f"{height:,.{digits}f} MB" + " refused" * (0 < limit < height * MB)
    if limit:
        axes.axhline(limit / MB, color="black", linewidth=1.4)
        budget = f"budget {limit / MB:.4g} MB"
        axes.annotate(budget, (0.1, limit / MB), (0, 4), textcoords="offset points", fontsize=8)
    axes.annotate(text, (x, height), (0, 4), textcoords="offset points", ha="center", fontsize=8)


def name_terms(axes: Axes, columns: Sequence[Column], top: float, width: float) -> None:
    """Write each term's name into its area, where it is highest and if it is high enough there. `width` in inches."""
    taken, end = list[tuple[float, float, float]](), columns[-1].right
    for term in STYLES:
        spans = [column.span(term) for column in columns]
        highest = max(high - low for low, high in spans)
        if highest < 0.05 * top:
            continue
        places = list[tuple[float, float]]()
        margin = 0.038 * len(term) / width * end  # half a name; a letter has about 0.076 inches
        for column, (low, high) in zip(columns, spans, strict=True):
            x, y = min(max(column.left, margin), end - margin), (low + high) / 2
            free = all(abs(x - a) > margin + b or abs(y - c) > 0.06 * top for a, b, c in taken)
            if free and high - low > 0.9 * highest:
                places.append((x, y))
        if places:
            x, y = places[len(places) // 2]
            label(axes, x, y, term, term)
            taken.append((x, margin, y))


def rest_figure(rests: Sequence[Rest], model: str) -> Figure:
    """Bytes per parameter at rest, measured, by stage and term; around each, as an outline, what was predicted."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, 1.4 + 0.5 * len(rests)), dpi=100, layout="constrained")
    axes = figure.subplots()
    widest = max(sum(rest.measured.values()) for rest in rests)
    for row, rest in enumerate(rests):
        left = outline = 0.0
        for term, size in rest.measured.items():
            axes.barh(row, size, 0.5, left, **look(term), linewidth=0)
            if size > 0.04 * widest:
                label(axes, left + size / 2, row, f"{size:.2f}", term)
            left += size
        for size in (rest.predicted or {}).values():
            axes.barh(row, size, 0.7, outline, fill=False, edgecolor="black", linewidth=1)
            outline += size
        axes.text(max(left, outline), row, f"  {left:.2f}", va="center")
    axes.set_yticks(range(len(rests)), [rest.name for rest in rests])
    axes.set_ylim(len(rests) - 0.5, -0.5)
    axes.set_xlabel("bytes per parameter: measured; as an outline: predicted")
    legend(figure, tuple(rests[0].measured), f"Memory at rest: {model}")
    return figure


def look(term: str) -> dict[str, Any]:
    """How a term is filled, in all pictures."""
    face, hatch, line = STYLES[term]
    return {"facecolor": face, "hatch": hatch, "edgecolor": line}


def label(axes: Axes, x: float, y: float, text: str, term: str) -> None:
    """Write into a term's area, on a plain piece of it."""
    face = STYLES[term][0]
    ink = "white" if lightness(face) < 0.5 else "black"
    box = {"facecolor": face, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
    axes.text(x, y, text, color=ink, fontsize=8, ha="center", va="center", bbox=box)


def lightness(color: str) -> float:
    """What is left of a colour in grayscale: 0 is black, 1 is white."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def legend(figure: Figure, terms: Sequence[str], title: str) -> None:
    """The picture's title, and below it the terms in one row."""
    from matplotlib.patches import Patch

    handles = [Patch(**look(term), linewidth=0, label=term) for term in terms]
    figure.legend(
        handles=handles, title=title, title_fontsize=11, loc="outside upper center", ncols=len(terms), frameon=False
    )
