"""Lesson 03: who needs my whole gradient?

    mpirun -n 8 python lessons/03_zero2.py

A rank updates its own chunk of each unit, and so looks at its own chunk of the summed gradient only. ZeRO-2
stops the all-reduce half-way: after the reduce-scatter each rank has its chunk of the sum, and keeps that.
"""

import common
import minizero as mz
from minizero import functional as F
from minizero.backend import Array
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


class Watched(mz.Engine):
    """Any stage, counting the units whose whole gradient exists here while one is being reduced."""

    most = 0

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        kept = sum(u.gradient is not None and u.gradient.size == u.length for u in self.units)
        self.most = max(self.most, 1 + kept + sum(u.local is not None for u in self.units))
        return super().reduce(unit, gradient)


class WatchedDP(Watched, mz.DataParallel):
    """DP: every whole gradient stays until the step."""


class WatchedZero2(Watched, mz.Zero2):
    """ZeRO-2: a whole gradient lives until it is reduced."""


def whole_gradients(stage: type[Watched], task: common.Task, comm: mz.Communicator) -> int:
    engine = stage(task.model(), mz.Adam(lr=task.lr), comm)
    x, y = next(task.batches(comm.rank, comm.size))[0]
    engine.backward(F.cross_entropy(engine(x), y), examples=len(y))
    return engine.most


def main() -> None:
    task = common.Task(__doc__)
    comm = mz.Communicator()
    report = common.Report(__file__, task, comm)

    dp = train(mz.DataParallel, task, comm, report)
    zero1 = train(mz.Zero1, task, comm, report)
    zero2 = train(mz.Zero2, task, comm, report)

    report.memory()
    report.traffic()
    most = {"DP": whole_gradients(WatchedDP, task, comm), "ZeRO-2": whole_gradients(WatchedZero2, task, comm)}
    report.facts["whole_gradients"] = {**most, "units": len(zero2.units)}
    report.print(f"\nWhole gradients on a rank at once, of {len(zero2.units)} units: "
                 f"DP {most['DP']}, ZeRO-2 {most['ZeRO-2']}")  # fmt: skip
    report.same_bits(dp, zero1, zero2)
    report.end()


if __name__ == "__main__":
    main()
