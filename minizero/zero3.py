"""ZeRO-3: ... and 1/N of the weights?

A layer is needed whole while it runs forward and while it runs backward. In between, each rank keeps its chunk.
"""

from . import ring
from .flat import Unit
from .zero2 import Zero2


class Zero3(Zero2):
    """Each rank keeps its own chunk of everything. A unit is whole only while its module runs.

    Sends 3 Ψ(N-1)/N bytes per forward and backward, and nothing in the step. ("P_os+g+p"; PyTorch's FSDP.)
    """

    def place(self, unit: Unit) -> None:
        unit.weights = unit.own(unit.weights).copy()
        unit.unbind()

    def gather(self, unit: Unit) -> None:
        whole = unit.blank()
        unit.own(whole)[:] = unit.weights
        unit.bind(ring.all_gather(self.comm, whole))

    def release(self, unit: Unit) -> None:
        unit.unbind()

    def publish(self, unit: Unit) -> None:
        """Nothing yet: the next forward gathers."""
