"""Plain data parallelism: every rank holds everything.

Each rank computes gradients on its own slice of the batch. Their sum comes to all, so all make the same update.
"""

from . import ring
from .backend import Array
from .engine import Engine
from .flat import Unit


class DataParallel(Engine):
    """Weights, gradients and optimizer state are whole on every rank.

    Sends 2 Ψ(N-1)/N bytes per backward. The same as DeepSpeed's stage 0 and PyTorch's DDP.
    """

    def reduce(self, unit: Unit, gradient: Array) -> Array:
        return ring.all_reduce(self.comm, gradient)

    def mine(self, unit: Unit, vector: Array) -> Array:
        return vector

    def publish(self, unit: Unit) -> None:
        """Nothing to tell: everybody made the same update."""
