"""Lesson 06: what does an axis change that ZeRO doesn't?

    mpirun -n 8 python lessons/06_compose.py

Tensor and pipeline parallelism decide what a rank computes. ZeRO decides what the ranks of a data-parallel group
store. A GPT is trained on a mesh of both, under every stage. Then a layer that is too wide, and a model that is too
deep: which of them helps, and what does it send?
"""

from __future__ import annotations

import weakref
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import common
import data
import minizero as mz
from common import differ, tensors
from minizero import functional as F
from minizero import memory, nn, plan
from minizero.pipeline import Order, gpipe, one_f_one_b, timeline
from minizero.plan import format_bytes
from options import CONTEXT, Parser, number

STAGES = dict(zip(plan.STAGES, mz.STAGES, strict=True))
AXES = ("tp", "pp", "dp")
WIDTH, HEADS, LAYERS, BATCH = 64, 4, 4, 48  # of the GPT; examples per step
DEEP = [64, *[256] * 16, 10]  # lesson 05's cases C and D: a matrix too wide, and weights too large together
WIDE = [64, 512, 1024, 512, 1024, 512, 10]
Batches = list[tuple[Any, Any]]  # micro-batches


class Options(common.Task):
    """This lesson's command line, and its data: the lessons' own text, by character."""

    def __init__(self, ranks: int) -> None:
        parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
        add, count = parser.add_argument, number(int, 1, 1024)
        for axis, what in (("dp", "replicas"), ("pp", "stages"), ("tp", "slices")):
            add(f"--{axis}", type=count, help=f"{what}; of 8 ranks 2, if none of the three is given")
        add(
            "--steps", type=number(int, 2, 10_000), default=12, help="at least 2: moments exist from the second on (12)"
        )
        add("--micro-batches", type=number(int, 1, BATCH), default=4, help="k: backwards per step (4)")
        add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and gradients (bfloat16)")
        add("--json", action="store_true", help="print one JSON object, and nothing else")
        self.options = options = parser.parse_args()
        self.steps, self.k = options.steps, options.micro_batches
        given = [options.dp, options.pp, options.tp]
        if not any(given):
            pp, tp = (2, 2) if ranks % 8 == 0 else (2, 1) if ranks % 4 == 0 else (1, 1)
            given = [ranks // pp // tp, pp, tp]
        self.sizes = tuple(each or 1 for each in given)
        self.x, self.y, vocabulary = data.text(CONTEXT)
        self.vocab = -(-len(vocabulary) // 128) * 128  # so that no new letter in a text changes the bytes

    def model(self, split: Any = None) -> nn.Module:  # type: ignore[override]
        """The GPT. Not tied: that weight would be in the first and in the last stage of a pipeline."""
        return nn.GPT(vocab=self.vocab, context=CONTEXT, width=WIDTH, heads=HEADS, layers=LAYERS, tied=False,
                      dtype=self.options.dtype, split=split)  # fmt: skip

    def part(self, mesh: mz.Mesh) -> plan.Sizes:
        """What a rank should hold of it."""
        whole = plan.gpt(vocab=self.vocab, context=CONTEXT, width=WIDTH, heads=HEADS, layers=LAYERS, tied=False,
                         batch=1, tp=mesh.tp.size)  # fmt: skip
        return whole.stage(mesh.pp.rank, mesh.pp.size)

    def batches(self, rank: int, size: int) -> Iterator[Batches]:  # type: ignore[override]
        """For each step the micro-batches of one data-parallel rank."""
        for x, y in data.batches(self.x, self.y, BATCH, range(self.steps), rank, size):
            yield list(zip(np.array_split(x, self.k), np.array_split(y, self.k), strict=True))


def pipeline_of(
    stage: type[mz.Engine], mesh: mz.Mesh, task: Options, order: Order = one_f_one_b, accumulate: bool = False
) -> mz.Pipeline:
    model = task.model(split=mz.Split(mesh.tp))  # tp: a slice of each layer
    part = mz.Stage(model, mesh.pp)  # pp: some of the layers
    engine = stage(part, mz.Adam(lr=2e-3), mesh.dp)  # ZeRO: over the ranks that hold the same
    return mz.Pipeline(engine, mesh.pp, F.cross_entropy, order, accumulate)


@dataclass
class Seen:
    """What this rank saw of one training: bytes at rest, bytes sent in the last step by axis."""

    engine: mz.Engine
    held: dict[str, int]
    sent: dict[str, int]


def train(name: str, mesh: mz.Mesh, task: Options, report: common.Report) -> Seen:
    pipeline = pipeline_of(STAGES[name], mesh, task)
    groups, held, losses = {axis: getattr(mesh, axis) for axis in AXES}, {}, list[float]()
    for batch in task.batches(mesh.dp.rank, mesh.dp.size):
        for group in groups.values():
            group.traffic.clear()
        found = pipeline.backward(batch, [len(y) for _, y in batch])  # losses, on the last stage
        if pipeline.engine.steps:
            held = pipeline.engine.memory()
        pipeline.engine.step()
        sums = report.from_all(sum(float(loss) * len(y) for loss, (_, y) in zip(found, batch, strict=False)))
        losses.append(sum(sums) / BATCH / mesh.tp.size)
    shown = [losses[round(i * (len(losses) - 1) / 4)] for i in range(5)]
    title = "×".join(map(str, mesh.sizes))
    report.print(f"{title:8}{name:8}  loss " + " → ".join(f"{loss:.3f}" for loss in shown))
    report.facts["runs"][f"{title} {name}"] = {"loss": losses}
    sent = {axis: sum(g.traffic.values()) - g.traffic["control"] for axis, g in groups.items()}
    return Seen(pipeline.engine, held, sent)


def formulas(name: str, mesh: mz.Mesh, task: Options) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes that a rank should hold and send, from the sizes of its part alone."""
    part, recipe = task.part(mesh), plan.Recipe(task.options.dtype)
    (batch, *_), (dp, pp, tp) = task.batches(mesh.dp.rank, mesh.dp.size), mesh.sizes
    v = 4 * WIDTH * sum(x.size for x, _ in batch)  # kV: one activation of all micro-batches, (B, T, C) in float32
    blocks = sum(unit.name.startswith("blocks.") for unit in part.units)
    psi = recipe.weight * sum(unit.length(dp) for unit in part.units)
    neighbours = (mesh.pp.rank > 0) + (mesh.pp.rank < pp - 1)
    sent = {"tp": 8 * blocks * v * (tp - 1) // tp, "pp": neighbours * v,
            "dp": plan.traffic(name, task.k) * psi * (dp - 1) // dp}  # fmt: skip
    return plan.at_rest(part, recipe, name, dp), sent


def compare(mesh: mz.Mesh, task: Options, report: common.Report, seen: dict[str, Seen]) -> None:
    """The tables of what is held and what is sent, and three verdicts."""
    dp, pp, tp = mesh.sizes
    foretold = {name: formulas(name, mesh, task) for name in seen}
    elements = sum(unit.length for unit in seen["DP"].engine.units)
    here = mesh.pp.rank, elements, {name: (each.held, foretold[name][0]) for name, each in seen.items()}
    rows = {p: (count, held) for p, count, held in reversed(report.from_all(here))}
    report.facts["memory"] = {p: {n: h for n, (h, _) in held.items()} for p, (_, held) in rows.items()}
    report.print(f"\nHeld at rest by a rank, in bytes; it has 1/{pp * tp} of the model, and shares with dp = {dp}")
    report.print("                weights  gradients  optimizer │       all  predicted │ per parameter  at 13 billion")
    for p in sorted(rows):
        count, held = rows[p]
        for name, (terms, known) in held.items():
            total = sum(terms.values())
            cells = "".join(f"{n:11,}" for n in terms.values())
            report.print(f"pp {p}  {name:6}{cells} │{total:10,}{sum(known.values()):11,.0f} │"
                         f"{total / count:14.2f}{13 * total / count / pp / tp:12.2f} GB")  # fmt: skip

    most = {name: [max(sent) for sent in zip(*report.from_all([each.sent[axis] for axis in AXES]), strict=True)]
            for name, each in seen.items()}  # fmt: skip
    report.facts["traffic"] = most
    report.print(f"\nSent by the rank that sends most, per step of k = {task.k} micro-batches, in bytes")
    report.print("                 tp         pp         dp")
    for name, sent in most.items():
        report.print(f"{name:8}{''.join(f'{n:11,}' for n in sent)}")

    wrong = [f"{name} on rank {mesh.comm.rank}" for name, each in seen.items()
             if (each.held, each.sent) != foretold[name]]  # fmt: skip
    faults = [fault for each in report.from_all(wrong) for fault in each]
    why = ", ".join(faults) or f"{len(seen)} stages, {mesh.comm.size} ranks"
    report.verdict("bytes held and sent on every rank are those of the formulas", not faults, why)

    truth, wrong = tensors(seen["DP"].engine), []
    for name, each in seen.items():
        mine = tensors(each.engine)
        wrong += [f"{name} in {key} on rank {mesh.comm.rank}" for key in truth if differ(truth[key], mine.get(key))]
    faults = [fault for each in report.from_all(wrong) for fault in each]
    names = ", ".join(name for name in seen if name != "DP")
    same = f"{names}: all weight and moment tensors of each rank's part"
    report.verdict("same bits as DP on the same mesh", not faults, (faults or [same])[0])


def schedules(mesh: mz.Mesh, task: Options, report: common.Report) -> None:
    """GPipe and 1F1B: what each stage does in turn, and what it keeps alive."""
    stages, k = mesh.pp.size, task.k
    report.facts["live"] = {}
    for title, order in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        pipeline = pipeline_of(mz.Zero1, mesh, task, order)
        batch = next(task.batches(mesh.dp.rank, mesh.dp.size))
        outputs, most = list[Any](), 0
        forward = pipeline.run_forward

        def counting(i: int, *args: Any) -> None:
            nonlocal most
            forward(i, *args)  # noqa: B023
            outputs.append(weakref.ref(pipeline.live[i][1]))  # noqa: B023
            most = max(most, sum(output() is not None for output in outputs))  # noqa: B023

        pipeline.run_forward = counting  # type: ignore[method-assign]
        with memory.measure(pipeline.engine) as held:
            pipeline.backward(batch)
            pipeline.losses.clear()
        pipeline.engine.step()
        alive = dict(report.from_all((mesh.pp.rank, (most, held.peaks["forward"]["activations"]))))
        report.facts["live"][title] = {stage: count for stage, (count, _) in alive.items()}
        report.print(f"\n{title}, {stages} stages, k = {k}")
        for stage, row in enumerate(timeline(order, stages, k)):
            count, nbytes = alive[stage]
            turns = " ".join(f"{do or '.'!s:2}" for do in row)
            report.print(f"pp {stage}  {turns} │ {count} alive at once, {format_bytes(nbytes)} of activations")


def reductions(mesh: mz.Mesh, task: Options, report: common.Report) -> None:
    """What the dp group sends if every micro-batch is reduced, or only their sum; and what a rank holds meanwhile."""
    dp = mesh.dp.size
    report.facts["reductions"] = {}
    report.print(f"\nSent along dp in Ψ(dp-1)/dp, and gradients held before the last backward, in bytes per parameter: "
                 f"k = {task.k}")  # fmt: skip
    report.print("          each is reduced  held │ only their sum  held")
    for name, stage in STAGES.items():
        cells, facts = [], []
        for accumulate in (False, True):
            pipeline = pipeline_of(stage, mesh, task, accumulate=accumulate)
            elements = sum(unit.length for unit in pipeline.engine.units)
            backward, held = pipeline.run_backward, list[int]()

            def noting(i: int, *args: Any) -> None:
                backward(i, *args)  # noqa: B023
                held.append(pipeline.engine.memory()["gradients"])  # noqa: B023

            pipeline.run_backward = noting  # type: ignore[method-assign]
            batch = next(task.batches(mesh.dp.rank, dp))
            mesh.dp.traffic.clear()
            pipeline.backward(batch, [len(y) for _, y in batch])
            pipeline.engine.step()
            sent = sum(mesh.dp.traffic.values()) - mesh.dp.traffic["control"]
            psi = sum(unit.length * unit.dtype.itemsize for unit in pipeline.engine.units)
            units = sent * dp / (psi * (dp - 1)) if dp > 1 else 0
            facts.append((units, max(held[:-1], default=0) / elements))
            cells.append(f"{units:15.0f}{facts[-1][1]:6.2f}")
        report.facts["reductions"][name] = facts
        report.print(f"{name:8}  {' │'.join(cells)}")


@dataclass(frozen=True)
class Attempt:
    """A way to train an MLP on all ranks: a mesh, a stage, micro-batches."""

    stage: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    k: int = 1

    def __str__(self) -> str:
        more = f", {self.k} micro-batches" * (self.k > 1)
        return f"{self.dp}×{self.pp}×{self.tp} {self.stage}{more}"


def needs(
    way: Attempt, sizes: list[int], dtype: str, optimizer: Callable[[], mz.Optimizer], comm: mz.Communicator
) -> tuple[int, dict[str, int]]:
    """Train two steps on 4 examples per rank of `comm`; return this rank's largest moment, and what it sent by axis."""
    mesh = mz.Mesh(comm, way.dp, way.pp, way.tp)
    x, y = (np.array_split(each[: 4 * comm.size], way.dp)[mesh.dp.rank] for each in data.digits()[:2])
    batch = list(zip(np.array_split(x, way.k), np.array_split(y, way.k), strict=True))
    with memory.measure(existing=False) as seen:
        model = nn.MLP(sizes, dtype=dtype, split=mz.Split(mesh.tp))
        engine = STAGES[way.stage](mz.Stage(model, mesh.pp), optimizer(), mesh.dp)
        pipeline = mz.Pipeline(engine, mesh.pp, F.cross_entropy)
        for _ in range(2):
            for axis in AXES:
                getattr(mesh, axis).traffic.clear()
            pipeline.backward(batch)
            engine.step()
    sent = {axis: sum(getattr(mesh, axis).traffic.values()) - getattr(mesh, axis).traffic["control"] for axis in AXES}
    return sum(seen.peak.values()), sent


def too_large(
    title: str, ways: list[Attempt], cures: list[Attempt], limit: str, setting: Any, report: common.Report
) -> None:
    """Try all ways; those that fit into `limit` must be the cures."""
    assert report.comm
    report.print(f"\n{title}: each rank has {limit}")
    report.print("                             needs         sends along tp          pp          dp")
    fit, found = [], {}
    for way in ways:
        seen = report.from_all(needs(way, *setting, report.comm))
        most, sent = max(peak for peak, _ in seen), {axis: max(sent[axis] for _, sent in seen) for axis in AXES}
        verdict = "fits" if most <= plan.parse_bytes(limit) else "no"
        fit += [way] * (verdict == "fits")
        found[str(way)] = {"needs": most, "sent": sent}
        cells = "".join(f"{sent[axis]:12,}" for axis in AXES)
        report.print(f"{way!s:27}{format_bytes(most):>9}  {verdict:4}   {cells}")
    report.facts[title] = found
    names = ", ".join(map(str, fit))
    report.verdict(f"{title}: what helps is what should", fit == cures, names)


def main() -> None:
    comm = mz.Communicator()
    task = Options(comm.size)
    report = common.Report(__file__, task, comm)
    mesh = mz.Mesh(comm, *task.sizes)
    report.print(f"{mesh}\n")
    report.facts["mesh"] = mesh.sizes
    train("DP", mz.Mesh(comm, comm.size, 1, 1), task, report)
    seen = {name: train(name, mesh, task, report) for name in STAGES}
    compare(mesh, task, report, seen)
    schedules(mesh, task, report)
    reductions(mesh, task, report)
    if comm.size == 8:
        whole, cut = [Attempt(stage, dp=8) for stage in STAGES], [Attempt("ZeRO-3", dp=4, tp=2), Attempt("DP", tp=8)]
        others = [Attempt("ZeRO-3", dp=8, k=4), Attempt("ZeRO-3", dp=4, pp=2), Attempt("DP", pp=4, dp=2, k=4)]
        setting = WIDE, "bfloat16", lambda: mz.SGD(0.01)
        too_large("A layer too wide", [*whole, *others, *cut], cut, "3.8 MB", setting, report)
        cures = [whole[3], Attempt("DP", pp=8, k=8), Attempt("DP", tp=8)]
        too_large("A model too deep", [*whole, *cures[1:]], cures, "3.6 MB", (DEEP, "float32", mz.Adam), report)
    report.end()


if __name__ == "__main__":
    main()
