"""Where is each rank, if some ranks share a model's layers, some its depth, and some the data?

    mesh = mz.Mesh(comm, dp=2, pp=2, tp=2)             print(mesh), for 8 ranks:

            pp 0        pp 1                           tp   0-1, 2-3, 4-5, 6-7   hold slices of the same layers
            tp 0  tp 1  tp 0  tp 1                     dp   0-2, 1-3, 4-6, 5-7   hold the same, for other data
      dp 0     0     1     4     5                     pp   0-4, 1-5, 2-6, 3-7   hold layers that follow each other
      dp 1     2     3     6     7

A rank's place is ((pp * DP) + dp) * TP + tp. Tensor parallelism is innermost: it sends the most, and neighbouring
ranks are on the same node. The pipeline is outermost: it sends the least.

ZeRO is none of the axes. It asks what a *dp* group stores: `mz.Zero2(model, mz.Adam(), mesh.dp)`. The degree of
sharding is dp, not the number of ranks.
"""

from __future__ import annotations

import math

import numpy as np

from .comm import MPI, Communicator


class Mesh:
    """The ranks of `comm` in three axes, each with a ring of its own. Collective.

    Args:
        comm: the ranks to place; all of them where it is left out. An mpi4py communicator is taken, too.
        dp, pp, tp: ranks along each axis. Raises ValueError, on all ranks, unless they are integers of product N.

    Attributes:
        dp, pp, tp: this rank's group along each axis, a Communicator; its `rank` is the coordinate. An engine on `dp`
            knows that it trains a part of the model: norm and bad numbers are those of all parts, and `engine.save`
            has a directory for each.
        comm: the whole.
    """

    def __init__(self, comm: Communicator | MPI.Comm | None = None, dp: int = 1, pp: int = 1, tp: int = 1) -> None:
        self.comm = comm if isinstance(comm, Communicator) else Communicator(comm)
        if not all(isinstance(size, int | np.integer) for size in (dp, pp, tp)):
            raise ValueError(f"a mesh needs integers, not {dp=}, {pp=}, {tp=}")
        if min(dp, pp, tp) < 1 or dp * pp * tp != self.comm.size:
            raise ValueError(refusal(self.comm.size, dp, pp, tp))
        self.sizes = dp, pp, tp
        d, p, t = self.place(self.comm.rank)
        self.tp = self.comm.split(p * dp + d)
        self.dp = self.comm.split(p * tp + t)
        self.pp = self.comm.split(d * tp + t)
        if pp * tp > 1:
            self.dp.beyond, self.dp.part, self.dp.counts_copies = self.comm, f"pp{p}-tp{t}", t == 0

    def place(self, rank: int) -> tuple[int, int, int]:
        """The coordinates (dp, pp, tp) of a rank of `comm`."""
        dp, _, tp = self.sizes
        return rank // tp % dp, rank // (dp * tp), rank % tp

    def __str__(self) -> str:
        dp, pp, tp = self.sizes
        width, margin = len(str(self.comm.size - 1)) + 5, len(f"dp {dp - 1}")
        heads = ["  " + f"pp {p}".ljust(width * tp) for p in range(pp)]
        below = ["  " + "".join(f"tp {t}".rjust(width) for t in range(tp))] * pp
        rows = [" " * margin + "".join(heads), " " * margin + "".join(below)]
        for d in range(dp):
            ranks = [[str((p * dp + d) * tp + t).rjust(width) for t in range(tp)] for p in range(pp)]
            rows.append(f"dp {d}".ljust(margin) + "".join("  " + "".join(each) for each in ranks))
        return "\n".join(row.rstrip() for row in rows)


def refusal(ranks: int, dp: int, pp: int, tp: int) -> str:
    """What is wrong with these sizes, and which would fit: those most like them first."""
    fitting = [
        (ranks // (p * t), p, t) for p in range(1, ranks + 1) for t in range(1, ranks // p + 1) if ranks % (p * t) == 0
    ]

    def distance(sizes: tuple[int, int, int]) -> float:
        return sum(abs(math.log(a / max(b, 1))) for a, b in zip(sizes, (dp, pp, tp), strict=True))

    best = sorted(fitting, key=lambda sizes: (distance(sizes), sizes))[:10]
    more = f", and {len(fitting) - len(best)} more" if len(fitting) > len(best) else ""
    return (
        f"a mesh of dp {dp} × pp {pp} × tp {tp} needs {dp * pp * tp} ranks, and there are {ranks}. These would fit: "
        + ", ".join(f"{d}×{p}×{t}" for d, p, t in best) + more
    )  # fmt: skip
