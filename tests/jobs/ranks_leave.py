"""One rank, `who`, leaves (`how`) while the others come to a place (`where`) that needs all: the job must end.

ranks_leave.py how who where
"""

import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import minizero as mz
from minizero import nn, ring
from minizero.backend import xp

how, who, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
world = MPI.COMM_WORLD
with_who = world.rank % 2 == who % 2  # the half of the ranks, odd or even, that `who` is in


def leave() -> None:
    os.write(1, f"leaving at {time.time()}\n".encode())
    if how == "raises":
        raise KeyError("the reason")
    if how == "sys.exit":
        sys.exit(3)
    if how == "SystemExit":
        raise SystemExit("the reason")
    if how == "exit":
        exit(3)
    if how == "os._exit":
        os._exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "thread":
        threading.Thread(target=lambda: {"a key": 0}["the reason"]).start()
        time.sleep(60)
    assert how == "returns"


def main() -> None:
    half = world.Split(int(with_who))
    if where.startswith("Communicator") and world.rank == who:
        return leave()
    comm = mz.Communicator(half if where == "Communicator(half)" and with_who else world)

    part = comm.split(int(with_who), -comm.rank)
    ring.all_reduce(comm, xp.ones(comm.size))
    ring.all_reduce(part, xp.ones(part.size))
    engine = mz.Zero2(nn.MLP([4, 8, 2]), mz.SGD(0.1), comm)
    loss = engine(np.ones((2, 4), np.float32)).sum()
    if world.rank == who:
        return leave()

    if where == "all_reduce":
        ring.all_reduce(comm, xp.ones(comm.size))
    elif where == "16 MiB":
        ring.all_gather(comm, xp.ones(comm.size << 21))
    elif where == "half":  # the other half works on, alone, and ends well
        ring.all_reduce(part, xp.ones(part.size))
    elif where == "split":
        comm.split(0)
    elif where == "backward":
        engine.backward(loss)
    else:
        raise AssertionError(f"where is {where!r}?")


main()
