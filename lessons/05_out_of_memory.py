"""Lesson 05: which allocation failed, and who frees it?

    mpirun -n 8 python lessons/05_out_of_memory.py

Each case trains for real on ranks that have too little memory: a budget refuses the allocation that crosses it.
The report says where that was and what was held, the diagnosis which illness it is. Then every stage is tried
under the same budget, and so is the cure.
"""

from __future__ import annotations

import textwrap
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np

import common
import data
import minizero as mz
import pictures
from minizero import functional as F
from minizero import memory, nn, plan
from minizero.plan import format_bytes
from options import Parser, size

STAGES = dict(zip(("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"), mz.STAGES, strict=True))
STEPS = 2  # moments exist from the second on: later ones hold the same
DEEP = [64, *[256] * 16, 10]
X, Y = data.digits()[:2]  # loaded before any budget


def deep(dtype: str = "bfloat16") -> nn.Module:
    """Seventeen narrow layers: a million parameters, the largest unit a fifteenth of them."""
    return nn.MLP(DEEP, dtype=dtype)


class Wide(nn.Module):
    """A small layer, one wide block of four matrices, a small layer."""

    small_units = False  # is each matrix of the block a unit of its own?

    def __init__(self, hidden: int = 1024) -> None:
        sizes = (64, 512), (512, hidden), (hidden, 512), (512, hidden), (hidden, 512), (512, 10)
        self.into, up1, down1, up2, down2, self.out = (nn.Linear(*size, dtype="bfloat16") for size in sizes)
        self.block = nn.Sequential(up1, F.relu, down1, up2, F.relu, down2)

    def forward(self, x: mz.Tensor) -> mz.Tensor:
        return self.out(self.block(F.relu(self.into(x))))

    def units(self) -> list[tuple[str, nn.Module]]:
        if not self.small_units:
            return super().units()
        matrices = [(f"block.{name}", matrix) for name, matrix in self.block.units()]
        return [("into", self.into), *matrices, ("out", self.out)]


class WideInSmallUnits(Wide):
    small_units = True


@dataclass(frozen=True)
class Case:
    """What is trained, on how little, and what it shall die of. `rows`: examples per rank and step."""

    title: str
    budget: str
    illness: str
    model: Callable[[], nn.Module]
    stage: str = "DP"
    rows: int = 4
    micro_batches: int = 1
    optimizer: Callable[[], mz.Optimizer] = mz.Adam


PLOT = (
    "draw FILE-step, the memory of case A's first step over time, under DP and under ZeRO-1. FILE ends in .png or "
    ".svg, or in neither, which writes both"
)


class Options(common.Task):
    """This lesson's command line: the cases bring everything else with them."""

    def __init__(self) -> None:
        parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
        parser.add_argument("--case", choices=list(CASES), action="append", help="only this one; may be given again")
        parser.add_argument("--budget", type=size, help="memory of a rank, in place of the cases' own")
        parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
        parser.add_argument("--plot", metavar="FILE", help=PLOT)
        self.options = parser.parse_args()
        self.plot = self.options.plot
        self.check_plot(parser)


def sgd() -> mz.Optimizer:
    return mz.SGD(0.01)


CASES = {
    "A": Case("DP at the optimizer step", "7 MB", "redundant state", deep),
    "B": Case("a block too wide to be whole", "6.1 MB", "one unit", Wide, "ZeRO-3", optimizer=sgd),
    "C": Case("a matrix too wide", "3.8 MB", "one unit", WideInSmallUnits, "ZeRO-3", optimizer=sgd),
    "D": Case("weights too large while building", "3.6 MB", "weights as a whole", lambda: deep("float32")),
    "E": Case("a batch too large", "4 MB", "activations", deep, "ZeRO-3", rows=180),
    "F": Case("DP in the second step's forward", "13.3 MB", "redundant state", deep, rows=180),
}


def build(case: Case) -> mz.Engine:
    """The case's engine, with a communicator and an optimizer that have no scratch from an earlier one."""
    return STAGES[case.stage](case.model(), case.optimizer(), mz.Communicator())


def backward(engine: mz.Engine, case: Case) -> None:
    """Gradients of this rank's rows of the digits."""
    mine = (engine.comm.rank * case.rows + np.arange(case.rows)) % len(X)
    for rows in np.array_split(mine, case.micro_batches):
        loss = F.cross_entropy(engine(X[rows]), Y[rows])
        engine.backward(loss)


def step(engine: mz.Engine, case: Case) -> None:
    backward(engine, case)
    engine.step()


def train(case: Case) -> int:
    """Train a few steps under the case's budget; return the largest moment, in bytes. Raises OutOfMemory."""
    with memory.budget(case.budget, existing=False) as device:
        engine = build(case)
        for _ in range(STEPS):
            step(engine, case)
    return device.highest


def attempt(case: Case) -> memory.OutOfMemory | int:
    """The error it ends in, or the largest moment in bytes."""
    try:
        return train(case)
    except memory.OutOfMemory as error:
        return error.with_traceback(None)  # which would keep the engine alive


def told(end: memory.OutOfMemory | int) -> str:
    """How an attempt ended, in words."""
    if isinstance(end, int):
        return f"trains, peak {format_bytes(end)}"
    phase = "update" if end.phase == "step" else end.phase
    return f"out of memory: {phase}" + f" of step {end.steps + 1}" * (phase != "building")


def cured(case: Case, found: memory.Diagnosis) -> Case | None:
    """The case after the treatment that the diagnosis names; None if it names none, or more ranks than there are."""
    if not found.cure or found.ranks:
        return None
    case = replace(case, stage=found.stage or case.stage, micro_batches=found.micro_batches)
    if found.split > 1:  # one rank's slices of the matrices, cut as tensor parallelism cuts them
        return replace(case, model=lambda: WideInSmallUnits(1024 // found.split))
    if found.illness == "one unit":
        return replace(case, model=WideInSmallUnits)
    return case


def wrapped(text: object) -> str:
    """For a screen of 100 columns."""
    lines = str(text).splitlines()
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def phases(case: Case, report: Report) -> None:
    """The largest moment of each phase of a second step without a budget: measured, and predicted."""
    engine = build(case)
    step(engine, case)
    with memory.measure(engine) as seen:
        step(engine, case)
    sizes, recipe = plan.mlp(DEEP, case.rows), plan.recipe_of(engine)
    assert recipe
    predicted = plan.peaks(sizes, recipe, case.stage, report.ranks)
    rows = {phase: seen.peaks[phase] for phase in ("forward", "backward", "step")}
    highest = {term: max(terms[term] for terms in rows.values()) for term in memory.TERMS}
    report.facts["phases"] = {"measured": rows, "predicted": {phase: predicted[phase] for phase in rows}}
    report.print(f"\nThe largest moment of each phase, in bytes: {case.stage}, {case.rows} examples, second step")
    report.print(f"{'':8}" + "".join(f"{term:>12}" for term in memory.TERMS) + " │      all  predicted")
    for phase, terms in (*rows.items(), ("highest", highest)):
        cells = "".join(f"{terms[term]:12,}" for term in memory.TERMS)
        foretold = f"{sum(predicted[phase].values()):11,}" if phase in rows else "  never held at once"
        report.print(f"{phase:8}{cells} │{sum(terms.values()):10,}{foretold}")


def record(case: Case, steps: list[pictures.Step]) -> None:
    """The first step under the case's budget, allocation by allocation, as far as it comes. Rank 0 looks."""
    with suppress(memory.OutOfMemory), memory.budget(case.budget, existing=False):
        engine = build(case)
        with nullcontext() if engine.comm.rank else pictures.recording(engine, steps, case.stage):
            step(engine, case)


def at_rest(case: Case) -> pictures.Rest:
    """What the case's stage holds at rest in the second step, without a budget: measured, and predicted."""
    engine = build(case)
    step(engine, case)
    backward(engine, case)
    elements, held, recipe = sum(unit.length for unit in engine.units), engine.memory(), plan.recipe_of(engine)
    assert recipe
    foretold = plan.at_rest(plan.sizes_of(engine), recipe, case.stage, engine.comm.size)
    return pictures.Rest(case.stage, *({term: each[term] / elements for term in held} for each in (held, foretold)))


class Report(common.Report):
    """With pictures of case A."""

    recorded: tuple[Case, list[pictures.Step], list[pictures.Rest]]

    def plot(self, file: str) -> None:
        case, steps, rests = self.recorded
        if not steps:
            return self.print("\n--plot: case A fails before its first step: nothing is drawn")
        title = f"N = {self.ranks}, bfloat16, mlp of {len(DEEP) - 1} layers, width 256, {case.rows} examples per rank"
        self.facts["pictures"] = pictures.draw(file, title, steps, rests, plan.parse_bytes(case.budget))
        self.drawn(steps)


def main() -> None:
    comm = mz.Communicator()
    report = Report(__file__, Options(), comm)
    small = replace(CASES["A"], model=lambda: nn.MLP([64, 10], dtype="bfloat16"))
    step(build(small), small)  # makes the scratch that all cases share, so that their order does not matter
    foretold, healed = [], []
    for letter in report.task.options.case or CASES:
        case = replace(CASES[letter], budget=report.task.options.budget or CASES[letter].budget)
        report.print(f"\nCase {letter}: {case.title}")
        report.print(f"{case.stage}, {case.rows} examples per rank, budget {case.budget}")
        tried = {stage: attempt(replace(case, stage=stage)) for stage in STAGES}
        error = tried[case.stage]
        if isinstance(error, int):
            report.print(f"It {told(error)}: here the budget is enough.")
            continue
        found = memory.diagnose(error)
        report.print(wrapped(f"{error}\n{found}"))
        report.print(
            "Tried, on the same budget:" + "".join(f"\n  {stage:8}{told(end)}" for stage, end in tried.items())
        )
        treated = cured(case, found)
        if treated is None:
            after = f"to be tried on {found.ranks} ranks" if found.ranks else "there is no cure"
        elif treated == replace(case, stage=treated.stage):  # tried already
            after = told(tried[treated.stage])
        else:
            after = told(attempt(treated))
        report.print(f"After the cure: {after}")
        foretold.append(found.illness == case.illness)
        if treated is not None:
            healed.append(after.startswith("trains"))
        report.facts["runs"][letter] = {"illness": found.illness, "cure": found.cure, "after": after,
                                        "tried": {stage: told(end) for stage, end in tried.items()}}  # fmt: skip
        if letter == "F":
            phases(replace(case, stage="ZeRO-1"), report)
    if healed:
        report.verdict("every cure cures", all(healed), f"{sum(healed)} of {len(healed)}")
    if foretold and comm.size == 8 and not report.task.options.budget:
        illnesses = f"{sum(foretold)} of {len(foretold)}"
        report.verdict("each case shows the illness it was built for", all(foretold), illnesses)
    if report.task.plot:
        case = replace(CASES["A"], budget=report.task.options.budget or CASES["A"].budget)
        report.recorded = case, [], [at_rest(replace(case, stage=stage)) for stage in STAGES]
        for stage in ("DP", "ZeRO-1"):
            record(replace(case, stage=stage), report.recorded[1])
    report.end()


if __name__ == "__main__":
    main()
