"""Lesson 04: when is a layer needed whole?

    mpirun -n 8 python lessons/04_zero3.py

While it runs forward, and while it runs backward. ZeRO-3 keeps a chunk of each unit's weights on each rank,
gathers the unit just before either, and drops it right after. What it needs besides is room for one whole unit,
and that does not grow with the number of units.
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


class Watched(mz.Zero3):
    """Zero3, noting what is whole whenever something has just been gathered or is about to be reduced."""

    units_whole = weights_whole = gradients_whole = 0  # the most at once; bytes, but for the first

    def gather(self, unit: Unit) -> None:
        super().gather(unit)
        at_rest = sum(u.weights.nbytes for u in self.units)
        self.units_whole = max(self.units_whole, sum(u.whole for u in self.units))
        self.weights_whole = max(self.weights_whole, self.memory()["weights"] - at_rest)

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        waiting = sum(u.local.nbytes for u in self.units if u.local is not None)
        self.gradients_whole = max(self.gradients_whole, gradient.nbytes + waiting)
        return super().reduce(unit, gradient)


def depth(layers: int, task: common.Task, comm: mz.Communicator, report: common.Report) -> None:
    """One step of a model with so many layers: how much of it was whole at once?"""
    engine = Watched(task.model(layers), mz.Adam(lr=task.lr), comm)
    x, y = next(task.batches(comm.rank, comm.size))[0]
    engine.backward(F.cross_entropy(engine(x), y), examples=len(y))
    engine.step()
    row = {"model": sum(unit.length for unit in engine.units) * task.itemsize, "units": engine.units_whole,
           "weights": engine.weights_whole, "gradients": engine.gradients_whole}  # fmt: skip
    report.facts.setdefault("temporary", {})[layers] = row
    report.print(f"{layers:6} │{row['model']:12,} bytes │{row['units']:12} │{row['weights']:9,} bytes │"
                 f"{row['gradients']:10,} bytes")  # fmt: skip


def main() -> None:
    task = common.Task(__doc__)
    comm = mz.Communicator()
    report = common.Report(__file__, task, comm)

    dp = train(mz.DataParallel, task, comm, report)
    zero1 = train(mz.Zero1, task, comm, report)
    zero2 = train(mz.Zero2, task, comm, report)
    zero3 = train(mz.Zero3, task, comm, report)

    report.memory()
    report.print("\nZeRO-3's temporary memory: what is whole on a rank at the same time, at most")
    report.print("layers │  all its weights │ units whole │  their weights │ their gradients")
    for layers in (4, 16):
        depth(layers, task, comm, report)
    report.traffic()
    report.same_bits(dp, zero1, zero2, zero3)
    report.end()


if __name__ == "__main__":
    main()
