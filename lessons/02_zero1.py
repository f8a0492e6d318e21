"""Lesson 02: who needs my moments?

    mpirun -n 8 python lessons/02_zero1.py

Adam's two moments of a weight are read by whoever updates that weight, and by nobody else. Under plain data
parallelism all ranks make the same update, so all keep the same moments. ZeRO-1 lets one rank make it: each
updates its own chunk of each unit, keeps the moments of that chunk, and then tells the others the new weights.
"""

import common
import minizero as mz
from minizero import functional as F


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


def owners(engine: mz.Engine, report: common.Report) -> None:
    """Who updates what: the first unit's chunks, and the moments that each rank really holds for them."""
    unit = engine.units[0]
    moments = {key: array.size for key, array in (unit.state or {}).items()}
    rows = report.from_all((unit.chunk.start, unit.chunk.stop, moments))
    report.facts["owners"] = {unit.name: rows, "length": unit.length}
    report.print(f"\nWho updates {unit.name}, a vector of {unit.length:,} elements, and keeps moments for it")
    for rank, (start, stop, held) in enumerate(rows[:8]):
        sizes = ", ".join(f"{size:,} of {key}" for key, size in held.items())
        report.print(f"rank {rank}: elements {start:,} to {stop - 1:,} │ holds {sizes}")
    if len(rows) > 8:
        report.print(f"... and so on to rank {len(rows) - 1}")


def main() -> None:
    task = common.Task(__doc__)
    comm = mz.Communicator()
    report = common.Report(__file__, task, comm)

    dp = train(mz.DataParallel, task, comm, report)
    zero1 = train(mz.Zero1, task, comm, report)

    owners(zero1, report)
    report.memory()
    report.traffic()
    report.same_bits(dp, zero1)
    report.end()


if __name__ == "__main__":
    main()
