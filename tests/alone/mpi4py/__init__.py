"""One rank alone: a test double of mpi4py, for a machine on which it finds no MPI library. See tests/gpu_check.py.

It knows as much as minizero asks of MPI.COMM_WORLD, and delivers messages that the rank sends to itself.
"""


def rc(**options: object) -> None: ...
