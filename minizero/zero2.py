"""ZeRO-2: ... and 1/N of the gradients?

An all-reduce is a reduce-scatter and an all-gather. After the first half each rank has the sum of its own chunk,
and nobody looks at the rest.
"""

from . import ring
from .backend import Array
from .flat import Unit
from .zero1 import Zero1


class Zero2(Zero1):
    """Each rank keeps its own chunk of the summed gradient. A whole one exists for one unit at a time.

    Sends 1 Ψ(N-1)/N bytes per backward, and 1 per step: no more than plain data parallelism. ("P_os+g".)
    """

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        return ring.reduce_scatter(self.comm, gradient).copy()  # a copy: a view would keep the rest alive
