"""ZeRO-1: what changes when each rank keeps 1/N of the optimizer state?

The moments of an element are needed only by whoever updates it. So let one rank update it, and tell the others.
"""

from . import ring
from .backend import Array
from .data_parallel import DataParallel
from .flat import Unit


class Zero1(DataParallel):
    """Each rank updates its own chunk of the weights, and keeps moments for that chunk only.

    Sends 2 Ψ(N-1)/N bytes per backward, and 1 per step. (Rajbhandari et al. 2020, arXiv 1910.02054: "P_os".)
    """

    def mine(self, unit: Unit, vector: Array) -> Array:
        return unit.own(vector)

    def publish(self, unit: Unit) -> None:
        ring.all_gather(self.comm, unit.weights)
