"""All stages and the truth, bit by bit, after every step, on every rank, for all cases of proof_cases.py.

    mpirun -n 5 python tests/jobs/proof.py [part of a case's text ...]     # all cases, or those that contain the parts

Rank 0 prints what was compared, as JSON; anything that differs raises.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))
from proof_cases import CLIP, OPTIMIZERS, STEPS, Case, cases

import minizero as mz
from models import PROBLEMS, Batch
from oracle import Oracle, Vector, differing, same_bits

world = MPI.COMM_WORLD
Flat = dict[str, Vector]  # all weights and all state, by name
counts: Counter[str] = Counter()


class Truth(NamedTuple):
    """What one step leads to."""

    tensors: Flat
    losses: list[list[float]]  # [rank][micro-batch]
    norm: float | None


def flat(weights: dict[str, Vector], state: dict[str, dict[str, Vector]]) -> Flat:
    return {**weights, **{f"{name}:{key}": x for name, kept in state.items() for key, x in kept.items()}}


def batch_of(case: Case, number: int, step: int, rank: int, micro: int) -> Batch:
    generator = np.random.default_rng([number, step, rank, micro])
    batch = PROBLEMS[case.problem].draw(generator, case.examples(world.size)[rank][micro], case.dtype)
    if case.problem == "skipping":
        batch = batch._replace(inputs=(*batch.inputs, rank == 0))
    return batch


def truth_of(case: Case, number: int) -> list[Truth]:
    """The start, and what follows from each step; by one process alone."""
    problem, n = PROBLEMS[case.problem], world.size
    oracle = Oracle(problem.build(0, case.dtype), OPTIMIZERS[case.optimizer](), n)
    steps = [Truth(dict(oracle.weights), [], None)]
    for step in range(STEPS[world.size]):
        batches = [[batch_of(case, number, step, r, m) for m in range(case.micros)] for r in range(n)]
        norm = oracle.step(
            problem.loss,
            batches,
            examples=None if case.slices == "even" else case.examples(n),
            no_sync=case.no_sync,
            clip=case.clip,
        )
        steps.append(Truth(flat(oracle.weights, oracle.state), oracle.losses, norm))
    must_move(case, oracle, steps)
    return steps


def must_move(case: Case, oracle: Oracle, steps: list[Truth]) -> None:
    """Equality of what never moves proves nothing: every trained tensor must have left its start, every moment zero."""
    for name, x in steps[-1].tensors.items():
        parameter, _, key = name.partition(":")
        start = steps[0].tensors[parameter] if key in ("", "master") else np.zeros_like(x)
        unused = case.problem == "skipped" and parameter.startswith("middle")
        unused |= case.problem == "skipping" and parameter.startswith("middle") and world.size == 1
        decays = "adam" in case.optimizer and not key.startswith("exp_avg")
        fixed = not oracle.parameters[parameter].requires_grad or x.size == 0 or (unused and not decays)
        moved = differing(x, start.astype(x.dtype))
        assert (moved == 0) == fixed, f"{case} {name}: {moved} of {x.size} elements have left their start"
    for _, _, norm in steps[1:]:
        assert case.clip is None or (norm is not None and (norm > case.clip) == (case.clip == CLIP)), f"{case}: {norm}"


def compare(found: Flat, wanted: Flat, what: str, where: str) -> None:
    assert found.keys() == wanted.keys(), f"{where}, {what}: {sorted(found.keys() ^ wanted.keys())}"
    for name, x in wanted.items():
        y = found[name]
        assert same_bits(x, y), (
            f"{where}, {what}: {name} differs in {differing(x, y)} of {x.size} elements"
            if x.shape == y.shape and x.dtype == y.dtype
            else f"{where}, {what}: {name} is {y.dtype} {y.shape} instead of {x.dtype} {x.shape}"
        )
        counts[what] += 1


def prove(case: Case, number: int, truth: list[Truth]) -> None:
    """Train all stages, each from the start to the end, and compare after every step."""
    problem, rank = PROBLEMS[case.problem], comm.rank
    examples = case.examples(comm.size)[rank]
    data_parallel: list[Flat] = []
    for stage in case.stages:
        seed = 0 if "dropout" in case.problem else 100 * rank  # rank 0's values become everybody's
        engine: Any = stage(problem.build(seed, case.dtype), OPTIMIZERS[case.optimizer](), comm)
        compare(engine.gather_parameters(), truth[0].tensors, "start", f"{case}, {stage.__name__}")
        for step in range(STEPS[world.size]):
            where = f"{case}, {stage.__name__}, step {step + 1}"
            for micro in range(case.micros):
                loss = problem.loss(engine, batch_of(case, number, step, rank, micro))
                assert loss.item() == truth[step + 1].losses[rank][micro], f"{where}: the loss differs"
                given = None if case.slices == "even" else examples[micro]
                if case.no_sync[micro]:
                    with engine.no_sync():
                        engine.backward(loss, examples=given)
                else:
                    engine.backward(loss, examples=given)
                counts["losses"] += 1
            if case.clip is not None:
                norm = engine.clip_grad_norm(case.clip)
                assert norm == truth[step + 1].norm, f"{where}: norm {norm!r} instead of {truth[step + 1].norm!r}"
                counts["norms"] += 1
            engine.step()
            found = flat(engine.gather_parameters(), engine.gather_optimizer_state())
            compare(found, truth[step + 1].tensors, "truth", where)
            if stage is case.stages[0]:
                data_parallel.append(found)
            else:
                compare(found, data_parallel[step], "data parallelism", where)


comm = mz.Communicator()
chosen = [
    (number, case)
    for number, case in enumerate(world.bcast(cases(comm.size) if comm.rank == 0 else None))
    if all(part in str(case) for part in sys.argv[1:])
]
mine = {number: truth_of(case, number) for number, case in chosen[comm.rank :: comm.size]}  # shared out, to save time
for turn, (number, case) in enumerate(chosen):
    prove(case, number, world.bcast(mine.get(number), root=turn % comm.size))

everywhere = world.reduce(counts)
if comm.rank == 0 and everywhere:
    print(json.dumps({"cases": len(chosen), **everywhere}))
