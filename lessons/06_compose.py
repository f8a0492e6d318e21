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
from minizero.mesh import refusal
from minizero.pipeline import gpipe, one_f_one_b, timeline
from options import CONTEXT, Parser, number

STAGES = dict(zip(plan.STAGES, mz.STAGES, strict=True))
AXES = ("tp", "pp", "dp")
WIDTH, HEADS, LAYERS, BATCH = 64, 4, 4, 32  # of the GPT; examples per step
X, Y = data.digits()[:2]
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
        self.sizes = dp, pp, tp = tuple(each or 1 for each in given)
        if dp * pp * tp != ranks:
            parser.error(refusal(ranks, dp, pp, tp))
        if pp > LAYERS or HEADS % tp:
            parser.error(f"a GPT of {LAYERS} blocks and {HEADS} heads has no {pp} stages of {tp} slices")
        self.x, self.y, vocabulary = data.text(CONTEXT)
        self.vocab = -(-len(vocabulary) // 128) * 128  # so that no new letter in a text changes the bytes

    def model(self, split: Any = None) -> nn.Module:
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
    stage: type[mz.Engine], mesh: mz.Mesh, task: Options, *options: Any, kind: type[mz.Pipeline] = mz.Pipeline
) -> mz.Pipeline:
    model = task.model(split=mz.Split(mesh.tp))  # tp: a slice of each layer
    part = mz.Stage(model, mesh.pp)  # pp: some of the layers
    engine = stage(part, mz.Adam(lr=2e-3), mesh.dp)  # ZeRO: over the ranks that hold the same
    return kind(engine, mesh.pp, F.cross_entropy, *options)


class Counting(mz.Pipeline):
    """Counts how many micro-batches are really alive, by references that keep nothing alive; notes gradients held."""

    most = 0

    def backward(self, *args: Any) -> list[mz.Tensor]:
        self.alive, self.held = list[Any](), list[int]()
        return super().backward(*args)

    def run_forward(self, i: int, *args: Any) -> None:
        super().run_forward(i, *args)
        self.alive.append(weakref.ref(self.live[i][0 if self.last else 1]))  # losses stay
        self.most = max(self.most, sum(output() is not None for output in self.alive))

    def run_backward(self, i: int, *args: Any) -> None:
        super().run_backward(i, *args)
        self.held.append(self.engine.memory()["gradients"])


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
    same = f"{names}: all weights and moments on every rank"
    report.verdict("same bits as DP on the same mesh", not faults, (faults or [same])[0])


def norms(mesh: mz.Mesh, task: Options, report: common.Report) -> None:
    """The gradient's norm over the whole mesh; and if what all tp ranks hold were counted on each of them."""
    pipeline, comm = pipeline_of(mz.DataParallel, mesh, task), mesh.dp
    batch, once = next(task.batches(comm.rank, comm.size)), comm.counts_copies
    pipeline.backward(batch, [len(y) for _, y in batch])
    right = pipeline.engine.clip_grad_norm(1e9)
    comm.counts_copies = True
    wrong = pipeline.engine.clip_grad_norm(1e9)
    comm.counts_copies = once
    report.facts["norm"] = {"once": right, "tp times": wrong}
    report.print(f"\ngradient norm {right:.4f} over the whole mesh, each parameter counted once")
    report.print(f"gradient norm {wrong:.4f} if what all tp ranks hold were counted on each of them")


def schedules(mesh: mz.Mesh, task: Options, report: common.Report) -> None:
    """GPipe and 1F1B: what each stage does in turn, and what it keeps alive."""
    report.facts["live"] = {}
    for title, order in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        pipeline = pipeline_of(mz.Zero1, mesh, task, order, kind=Counting)
        with memory.measure(pipeline.engine) as seen:
            pipeline.backward(next(task.batches(mesh.dp.rank, mesh.dp.size)))
        mine = pipeline.most, seen.peaks["forward"]["activations"]  # type: ignore[attr-defined]
        alive = dict(report.from_all((mesh.pp.rank, mine)))
        report.facts["live"][title] = {stage: count for stage, (count, _) in sorted(alive.items())}
        turns = timeline(order, mesh.pp.size, task.k)
        waits = f"{sum(do is None for do in turns[0])} of {len(turns[0])} turns"
        report.print(f"\n{title}, k = {task.k}: each stage waits in {waits}")
        for stage, row in enumerate(turns):
            count, nbytes = alive[stage]
            told = " ".join(f"{do or '.'!s:2}" for do in row)
            report.print(f"pp {stage}  {told} │ {count} alive at once, {nbytes / 1e6:.1f} MB of activations")


def reductions(mesh: mz.Mesh, task: Options, report: common.Report) -> None:
    """What the dp group sends if every micro-batch is reduced, or only their sum; and what a rank holds meanwhile."""
    dp = mesh.dp.size
    report.facts["reductions"] = {}
    report.print(f"\nSent along dp, in Ψ(dp-1)/dp; gradients held before the last backward, in bytes per parameter; "
                 f"k = {task.k}")  # fmt: skip
    report.print("          each is reduced  held │ only their sum  held")
    for name, stage in STAGES.items():
        cells, facts = [], []
        for accumulate in (False, True):
            pipeline: Any = pipeline_of(stage, mesh, task, one_f_one_b, accumulate, kind=Counting)
            batch, units = next(task.batches(mesh.dp.rank, dp)), pipeline.engine.units
            mesh.dp.traffic.clear()
            pipeline.backward(batch, [len(y) for _, y in batch])
            pipeline.engine.step()
            sent = sum(mesh.dp.traffic.values()) - mesh.dp.traffic["control"]
            psi = sum(unit.length * unit.dtype.itemsize for unit in units)
            facts.append((sent * dp / psi / (dp - 1), pipeline.held[-2] / sum(unit.length for unit in units)))
            cells.append(f"{facts[-1][0]:15.0f}{facts[-1][1]:6.2f}")
        report.facts["reductions"][name] = facts
        report.print(f"{name:8}  {' │'.join(cells)}")


@dataclass(frozen=True)
class Way:
    """A way to train on all ranks: a stage, a mesh, micro-batches."""

    stage: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    k: int = 1

    def __str__(self) -> str:
        return f"{self.dp}×{self.pp}×{self.tp} {self.stage}{f', k = {self.k}' * (self.k > 1)}"


@dataclass(frozen=True)
class Case:
    """An MLP for which a rank has too little memory, and what should help; the rest should not."""

    title: str
    sizes: list[int]
    dtype: str
    optimizer: Callable[[], mz.Optimizer]
    budget: str
    ways: list[Way]
    cures: list[Way]


WHOLE = [Way(stage, dp=8) for stage in STAGES]
CASES = [  # of lesson 05, C and D
    Case("a layer too wide", [64, 512, 1024, 512, 1024, 512, 10], "bfloat16", lambda: mz.SGD(0.01), "3.8 MB",
         [*WHOLE, Way("ZeRO-3", dp=8, k=4), Way("ZeRO-3", dp=4, pp=2), Way("ZeRO-1", dp=2, pp=4, k=4)],
         [Way("ZeRO-3", dp=4, tp=2), Way("DP", tp=8)]),
    Case("a model too deep", [64, *[256] * 16, 10], "float32", mz.Adam, "3.6 MB",
         WHOLE[:3], [WHOLE[3], Way("DP", pp=8, k=8), Way("DP", tp=8)]),
]  # fmt: skip


def try_out(way: Way, case: Case, comm: mz.Communicator) -> tuple[int, dict[str, int]]:
    """Train on 4 examples per rank of `comm`; return the largest moment of a step here, and what was sent by axis."""
    mesh = mz.Mesh(comm, way.dp, way.pp, way.tp)
    groups = {axis: getattr(mesh, axis) for axis in AXES}
    x, y = (np.array_split(each[: 4 * comm.size], way.dp)[mesh.dp.rank] for each in (X, Y))
    batch = list(zip(np.array_split(x, way.k), np.array_split(y, way.k), strict=True))
    model = nn.MLP(case.sizes, dtype=case.dtype, split=mz.Split(mesh.tp))
    engine = STAGES[way.stage](mz.Stage(model, mesh.pp), case.optimizer(), mesh.dp)
    pipeline = mz.Pipeline(engine, mesh.pp, F.cross_entropy)
    pipeline.backward(batch)
    engine.step()
    for group in groups.values():
        group.traffic.clear()
    with memory.measure(engine) as seen:  # of the second step: from now on, moments exist
        pipeline.backward(batch)
        engine.step()
    sent = {axis: sum(g.traffic.values()) - g.traffic["control"] for axis, g in groups.items()}
    return sum(seen.peak.values()), sent


def what_helps(case: Case, report: common.Report) -> None:
    """Try all ways; those that fit must be the cures."""
    assert report.comm
    report.print(f"\n{case.title.capitalize()}: each rank has {case.budget}")
    report.print("                          needs        waits │ sends along tp          pp          dp")
    fit, found = [], {}
    for way in [*case.ways, *case.cures]:
        seen = report.from_all(try_out(way, case, report.comm))
        most, sent = max(peak for peak, _ in seen), {axis: max(sent[axis] for _, sent in seen) for axis in AXES}
        fits = most <= plan.parse_bytes(case.budget)
        fit += [way] * fits
        turns = timeline(one_f_one_b, way.pp, way.k)[0]
        waits = f"{turns.count(None)} of {len(turns)}" if way.pp > 1 else ""
        found[str(way)] = {"needs": most, "sent": sent}
        cells = "".join(f"{n:12,}" for n in sent.values())
        report.print(f"{way!s:21}{most / 1e6:7.1f} MB  {'fits' if fits else 'no':5}{waits:>8} │    {cells}")
    report.facts[case.title] = found
    report.verdict(f"{case.title}: only what should help does", fit == case.cures, ", ".join(map(str, fit)))


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
    norms(mesh, task, report)
    if mesh.pp.size > 1:
        schedules(mesh, task, report)
    if mesh.dp.size > 1 and task.k > 1:
        reductions(mesh, task, report)
    for case in CASES if comm.size == 8 else ():
        what_helps(case, report)
    report.end()


if __name__ == "__main__":
    main()
