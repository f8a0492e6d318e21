"""Many communicators, and one rank that ends later than the others: the job must still end."""

import time

import minizero as mz

comm = mz.Communicator()
parts = [comm.split(0) for _ in range(100)]
if comm.rank == 1:
    time.sleep(1)
