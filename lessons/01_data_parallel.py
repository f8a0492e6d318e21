"""Lesson 01: how do N replicas stay one?

    mpirun -n 8 python lessons/01_data_parallel.py

mpirun starts this program N times. Each process, called a rank, has its own memory and draws the same model; only
what is sent is shared. Each rank computes gradients on its own slice of the batch. The ring adds them up, so that
all ranks make the same update, and the replicas stay equal to the last bit without ever comparing their weights.
"""

import hashlib
import os

import numpy as np

import common
import data
import minizero as mz
from minizero import backend, ring
from minizero import functional as F
from minizero.backend import Array
from minizero.comm import MPI
from minizero.flat import Unit


def train(stage: type[mz.Engine], task: common.Task, comm: mz.Communicator, report: common.Report) -> mz.Engine:
    with report.budget():  # a device of --budget bytes, if it is given
        model = task.model()
        engine = stage(model, mz.Adam(lr=task.lr), comm)
        for batch in report.steps(engine):
            for x, y in batch:  # the micro-batches of this rank's slice; one, if not told otherwise
                loss = F.cross_entropy(engine(x), y)
                engine.backward(loss, examples=len(y))
                report.loss(loss, len(y))
            report.at_rest()
            engine.step()
    return engine


class Unreduced(mz.DataParallel):
    """A fault on purpose: no rank ever hears of the others' gradients."""

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        return gradient


class Recording(mz.Communicator):
    """A Communicator that keeps a copy of each message that this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[int]] = []

    def exchange(self, send: Array, recv: Array) -> None:
        self.sent.append(backend.to_host(send).tolist())
        super().exchange(send, recv)


def introduce(task: common.Task, comm: mz.Communicator, report: common.Report) -> None:
    """Who is there, and which rows of each batch are whose?"""
    rows = data.share(np.arange(task.batch), comm.rank, comm.size)
    mine = f"rows {rows[0]} to {rows[-1]}" if len(rows) else "no rows"
    hellos = report.from_all((mine, MPI.Get_processor_name(), os.getpid()))
    report.facts["slices"] = [rows for rows, _, _ in hellos]
    for rank, (whose, node, process) in enumerate(hellos):
        report.print(f"hello from rank {rank}: {whose} of the batch are mine; machine: {node}, process {process}")


def ring_table(report: common.Report) -> None:
    """What really moves: each chunk carries its own number and, per rank, how often that rank was added."""
    comm = Recording()
    n, own = comm.size, np.eye(comm.size, dtype=np.int64)[comm.rank]
    vector = backend.xp.asarray(np.concatenate([[chunk, *own] for chunk in range(n)]))  # n chunks of 1 + n integers
    ring.reduce_scatter(comm, vector)
    ring.all_gather(comm, vector)
    sent = report.from_all([(total // sum(added), [r for r in range(n) if added[r]]) for total, *added in comm.sent])
    report.facts["ring"] = sent  # by rank, then by step: which chunk, and which ranks have been added to it
    for kind, first in (("reduce-scatter", 0), ("all-gather", n - 1)):
        report.print(f"\n{kind + ': sent to the right by':37}" + " ".join(f"rank {r}" for r in range(n)[:8]))
        for step in range(n - 1):
            chunks = "".join(f"{sent[r][first + step][0]:7}" for r in range(n)[:8])
            report.print(f"{f'step {step}: chunk':>36}{chunks}")
    order = [*(r for step in range(n - 1) for r in range(n) if sent[r][step][0] == 0), 0]
    report.print(f"\nChunk 0 is added in the order of ranks {', '.join(map(str, order))}.\n")


def replicas(engine: mz.Engine, report: common.Report) -> list[str]:
    """One hash over all weights and moments, of each rank."""
    digest = hashlib.sha256()
    for array in common.tensors(engine).values():
        digest.update(array.tobytes())
    return report.from_all(digest.hexdigest()[:16])


def main() -> None:
    task = common.Task(__doc__)
    comm = mz.Communicator()
    report = common.Report(__file__, task, comm)
    introduce(task, comm, report)
    ring_table(report)

    dp = train(mz.DataParallel, task, comm, report)
    report.memory()
    report.traffic()

    report.print("\nA falling loss proves nothing: the same once more, but no gradient is ever sent\n")
    unreduced = train(Unreduced, task, comm, report)
    hashes, strays = replicas(dp, report), replicas(unreduced, report)
    report.facts.update(hashes=hashes, unreduced={"hashes": strays, "loss": report.facts["runs"]["Unreduced"]["loss"]})
    report.print("\nA hash over all weights and moments   DP                  Unreduced")
    for rank, (hash_dp, hash_unreduced) in enumerate(zip(hashes, strays, strict=True)):
        report.print(f"{f'rank {rank}':>35}   {hash_dp}    {hash_unreduced}")
    copies = comm.size - len(set(hashes))
    report.facts["redundant"] = copies / comm.size
    report.print(f"Different hashes: {len(set(hashes))} and {len(set(strays))}. Of all that the ranks hold under DP, "
                 f"{copies}/{comm.size} is redundant.")  # fmt: skip
    report.verdict("same bits on every rank", len(set(hashes)) == 1, "DP: all weights and moments")
    report.end()


if __name__ == "__main__":
    main()
