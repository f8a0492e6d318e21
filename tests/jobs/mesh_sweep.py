"""Every mesh of 1 to 8 ranks: ZeRO-1, 2, 3 against DP, bit by bit; all of them against one process, in float64; bytes
held and sent against the formulas.

    mpirun -n 8 python tests/jobs/mesh_sweep.py [dp×pp×tp ...]

Rank 0 prints what was compared, as JSON; anything that is wrong raises.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import weakref
import zlib
from collections import Counter
from typing import Any

import numpy as np
from mesh_models import CUT, GPT, Problem, Truth, build, errors, train, truth
from mpi4py import MPI

import minizero as mz
from minizero import plan
from minizero.agreement import exchange_facts
from minizero.backend import to_host
from minizero.pipeline import gpipe, one_f_one_b
from minizero.tensor_parallel import Slice
from oracle import same_bits

world = mz.Communicator()
STEPS, BIT_STEPS, CLIP = 5, 2, 0.05
K = 4  # micro-batches; where the truth is the yardstick, two, or one without a pipeline
OPTIMIZERS: dict[str, Any] = {  # and how close to the truth they must come
    "SGD": (lambda: mz.SGD(0.5), CLIP, 1e-12),
    "Adam, eps 1e-4": (lambda: mz.Adam(0.01, eps=1e-4), None, 1e-12),
    "Adam": (lambda: mz.Adam(0.01), None, 1e-8),
}
counts: Counter[str] = Counter()
worst = dict.fromkeys(("norm", "loss", *OPTIMIZERS), 0.0)
Sizes = tuple[int, int, int]


def meshes(n: int) -> list[Sizes]:
    numbers = range(1, n + 1)
    return [each for each in itertools.product(numbers, numbers, numbers) if math.prod(each) == n]


def allowed(problem: Problem, tp: int) -> bool:
    return (GPT["heads"] if problem.kind == "gpt" else CUT) % tp == 0


def problems(dp: int, pp: int, tp: int) -> list[Problem]:
    """A pipeline of p stages needs p blocks; where there is none, the embedding is tied."""
    return [Problem("mlp", max(2, pp)), Problem("gpt", pp, tied=pp == 1 and dp < 3)]


class Watched(mz.Pipeline):
    """Counts the micro-batches whose activations are alive on this rank after each forward."""

    most = 0

    def run_forward(self, i: int, *args: Any) -> None:
        super().run_forward(i, *args)
        self.alive: list[weakref.ref[Any]] = [] if not i else self.alive
        self.alive.append(weakref.ref(self.live[i][0 if self.last else 1]))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))


def axis_traffic(problem: Problem, mesh: mz.Mesh, stage: type[mz.Engine], itemsize: int) -> dict[str, int]:
    """Bytes that a rank must send in one step, by axis; what is agreed on left out."""
    dp, pp, tp = mesh.sizes
    p, first, last = mesh.pp.rank, mesh.pp.rank == 0, mesh.pp.rank == pp - 1
    sizes = problem.sizes(1, tp, p, pp)
    psi = sum(unit.length(dp) for unit in sizes.units) * itemsize
    name = plan.STAGES[mz.STAGES.index(stage)]
    found = {"dp": plan.traffic(name, K) * psi * (dp - 1) // dp, "pp": 0, "tp": 0}
    if problem.kind == "mlp":
        return {**found, "pp": -1, "tp": -1}
    blocks = sum(unit.name.startswith("blocks") for unit in sizes.units)
    for x, _ in problem.micro_batches(0, "float32", mesh.dp.rank, dp):
        elements = x.size * GPT["width"]
        found["pp"] += 4 * elements * ((not last) + (not first))
        found["tp"] += 4 * blocks * 2 * (tp - 1) * 4 * -(-elements // tp)  # four all-reduces a block
    return found


def sent(mesh: mz.Mesh) -> dict[str, int]:
    axes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    return {axis: sum(comm.traffic.values()) - comm.traffic["control"] for axis, comm in axes.items()}


Held = dict[str, tuple[slice, Any]]  # of a unit's vector the part that is here, by unit and what it is


def held(engine: mz.Engine) -> Held:
    """Copies of all weights and moments that this rank holds now."""
    found: Held = {}
    for unit in engine.units:
        for name, vector in {"weights": unit.weights, **(unit.state or {})}.items():
            part = slice(0, unit.length) if vector.size == unit.length else unit.chunk
            found[f"{unit.name} {name}"] = part, to_host(vector).copy()
    return found


def same_on_tp_ranks(engine: mz.Engine, mesh: mz.Mesh, where: str) -> None:
    """Is what is not cut the same, to the last bit, on all ranks that hold it?"""
    sums = []
    for unit in engine.units:
        for vector in (unit.weights, *(unit.state or {}).values()):
            if vector.size == unit.length:
                whole = [part for p, part in unit.split(vector) if not isinstance(p, Slice)]
                sums += [zlib.crc32(to_host(part).tobytes()) for part in whole]
    table = exchange_facts(mesh.tp, *sums)
    assert (table == table[0]).all(), f"{where}: parameters that all tp ranks hold are no longer the same"
    counts["replicated"] += len(sums)


def check_bits(problem: Problem, mesh: mz.Mesh, dtype: str) -> None:
    """The four stages; every other one with the other order of the pipeline."""
    dp, pp, tp = mesh.sizes
    reference: list[Any] = []
    for stage, order in zip(mz.STAGES, (one_f_one_b, gpipe) * 2, strict=True):
        pipeline: Any = build(stage, problem, mz.Adam(0.01), mesh, dtype, Watched, order=order)
        engine = pipeline.engine
        for step in range(BIT_STEPS):
            where = f"{mesh.sizes} {problem} {dtype} {stage.__name__} {order.__name__}, step {step + 1}"
            for comm in (mesh.dp, mesh.pp, mesh.tp):
                comm.traffic.clear()
            losses = train(pipeline, problem, step, dtype)
            if step == BIT_STEPS - 1:
                sizes = problem.sizes(1, tp, mesh.pp.rank, pp)
                predicted = plan.at_rest(sizes, plan.Recipe(dtype), plan.STAGES[mz.STAGES.index(stage)], dp)
                assert engine.memory() == predicted, f"{where}: holds {engine.memory()}, not {predicted}"
                counts["memory"] += 1
            norm = engine.clip_grad_norm(CLIP)
            engine.step()
            counted, expected = sent(mesh), axis_traffic(problem, mesh, stage, 2 if dtype == "bfloat16" else 4)
            wrong = [axis for axis, n in expected.items() if n >= 0 and n != counted[axis]]
            assert not wrong, f"{where}: sent {counted}, not {expected}"
            counts["traffic"] += sum(n >= 0 for n in expected.values())
            found = (losses, norm, held(engine))
            if stage is mz.DataParallel:
                assert norm > CLIP, f"{where}: a norm of {norm} is not clipped"
                reference.append(found)
                continue
            assert found[:2] == reference[step][:2], f"{where}: losses and norm {found[:2]}, not {reference[step][:2]}"
            assert found[2].keys() == reference[step][2].keys(), f"{where}: other units, or other moments"
            for name, (part, vector) in found[2].items():
                assert same_bits(vector, reference[step][2][name][1][part]), f"{where}: {name} differ from DP's"
                counts["bits"] += 1
        live = K if order is gpipe else min(pp - mesh.pp.rank, K)
        if pp > 1:
            assert pipeline.most == live, f"{where}: {pipeline.most} micro-batches were alive, not {live}"
            counts["live"] += 1
        if tp > 1:
            same_on_tp_ranks(engine, mesh, where)


def check_truth(problem: Problem, mesh: mz.Mesh, truths: dict[Any, Truth], turn: int) -> None:
    """Each optimizer with one of the models, in turn from mesh to mesh, as are the stages."""
    for i, (name, (optimizer, clip, tolerance)) in enumerate(OPTIMIZERS.items()):
        with_gpt = allowed(Problem("gpt", 1), mesh.sizes[2]) and (turn + i) % 3 == 0
        if (problem.kind == "gpt") != with_gpt:
            continue
        stage, wanted = mz.STAGES[(turn + i) % 4], truths[problem, name]
        where = f"{mesh.sizes} {problem} {name} {stage.__name__}"
        pipeline, k = build(stage, problem, optimizer(), mesh, "float64", accumulate=i == 1), min(mesh.pp.size, 2)
        for step in range(STEPS):
            losses = train(pipeline, problem, step, "float64", k)
            if clip:
                norm, true = pipeline.engine.clip_grad_norm(clip), wanted.norms[step] or 0
                assert true > clip, f"{where}: the true norm {true} is not clipped"
                see("norm", abs(norm - true) / true, 1e-12, where)
            pipeline.engine.step()
            if losses:
                rows = [len(y) for _, y in problem.micro_batches(step, "float64", mesh.dp.rank, mesh.dp.size, k)]
                mean = exchange_facts(mesh.dp, float(np.dot(losses, rows))).sum() / 32
                see("loss", abs(mean - wanted.losses[step]) / wanted.losses[step], 1e-12 if i < 2 else 1e-8, where)
        for parameter, error in errors(pipeline.engine, wanted.weights).items():
            see(name, error, tolerance, f"{where}: {parameter}")


def see(what: str, error: float, tolerance: float, where: str) -> None:
    assert error < tolerance, f"{where}: {what} is wrong by {error:.3g} of its largest value"
    worst[what] = max(worst[what], error)
    counts[what] += 1


def refused(make: Any, *words: str) -> None:
    try:
        make()
    except ValueError as error:
        assert all(word in str(error) for word in words), f"{words} are missing in: {error}"
    else:
        raise AssertionError(f"not refused: {words}")
    counts["refused"] += 1


def check(mesh: mz.Mesh, truths: dict[Any, Truth], turn: int) -> None:
    dp, pp, tp = mesh.sizes
    for problem in problems(dp, pp, tp):
        split = mz.Split(mesh.tp)
        if not allowed(problem, tp):
            what = "attention heads" if problem.kind == "gpt" else "outputs"
            refused(lambda: problem.model("float32", split), f"tp = {tp} ranks cannot share", what)  # noqa: B023
            continue
        if pp > 1 and problem.kind == "gpt":
            tied = problem._replace(tied=True).model("float32", split)
            refused(lambda: mz.Stage(tied, mesh.pp), "token.weight is used by the stages", "tied=False")  # noqa: B023
            short = problem._replace(layers=pp - 1).model("float32", split)
            refused(lambda: mz.Stage(short, mesh.pp), f"{pp - 1} pieces cannot be cut", f"{pp} stages")  # noqa: B023
        check_bits(problem, mesh, ("float32", "bfloat16")[(dp + tp + (problem.kind == "gpt")) % 2])
        check_truth(problem, mesh, truths, turn)
        counts["trained"] += 1


def everything(chosen: list[str]) -> None:
    """Twice four ranks at once, then five beside three, six beside two ..."""
    turns: list[tuple[mz.Communicator, list[Sizes]]] = []
    for low in range(8, 3, -1):
        part = world.split(int(world.rank >= low))
        todo = meshes(part.size)
        if low == 4:
            todo = todo[world.rank // 4 :: 2]
        turns.append((part, [each for each in todo if not chosen or "×".join(map(str, each)) in chosen]))

    all_of_them = [each for n in range(1, 9) for each in meshes(n)]
    wanted = {problem for each in all_of_them for problem in problems(*each) if allowed(problem, each[2])}
    keys = [(problem, name) for problem in sorted(wanted) for name in OPTIMIZERS]
    mine = {}
    for problem, name in keys[world.rank :: world.size]:
        optimizer, clip, _ = OPTIMIZERS[name]
        mine[problem, name] = truth(problem, optimizer(), STEPS, clip)
    exchange_facts(world)  # waits with less effort than MPI's own collectives
    truths = {key: value for each in world.mpi.allgather(mine) for key, value in each.items()}

    for part, todo in turns:
        for sizes in todo:
            check(mz.Mesh(part, *sizes), truths, all_of_them.index(sizes))
            counts["meshes"] += part.rank == 0
    exchange_facts(world)
    everywhere = world.mpi.reduce(counts)
    largest = {what: world.mpi.reduce(error, MPI.MAX) for what, error in worst.items()}
    if world.rank == 0 and everywhere:
        print(json.dumps({**everywhere, "worst": largest}))


if __name__ == "__main__":
    everything(sys.argv[1:])
