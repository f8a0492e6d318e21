"""Ranks that end at different times, in every regular way, or that catch what others would die of: all end well."""

import contextlib
import sys
import time

import numpy as np
from mpi4py import MPI

import minizero as mz
from minizero import nn, ring
from minizero.backend import xp


def total(comm: mz.Communicator, count: int = 1) -> float:
    return float(ring.all_reduce(comm, xp.ones(comm.size * count))[0])


comm = mz.Communicator()
N = comm.size
first_half = comm.split(int(comm.rank < (N + 1) // 2))  # rank 0 is in the larger half; the others end at once
caught = comm.split(0)
assert total(comm) == N

with contextlib.suppress(SystemExit):
    sys.exit(3)
assert total(comm) == N, "a SystemExit that was caught has ended something"

# One rank has done with `caught` already; the others notice, catch the error, and go on with other things.
if caught.rank != 1:
    for _ in range(2):
        start = time.monotonic()
        try:
            total(caught, 1 << 21)  # 16 MiB per message: a rank that has ended must still take it from MPI's hands
        except mz.CollectiveError as error:
            text = str(error)
            assert "rank 1 has ended its program" in text, text
            assert f"rank {2 % N} waits for it in all_reduce" in text, text
            assert time.monotonic() - start < 8, f"it took {time.monotonic() - start:.1f} s to notice"
        else:
            raise AssertionError(f"rank {caught.rank} did not notice that rank 1 has ended")

if comm.rank == 0:  # works on alone, with an engine of its own, long after the others have ended
    engine = mz.Zero3(nn.MLP([4, 8, 2]), mz.Adam(), MPI.COMM_SELF)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        engine.backward(engine(np.ones((2, 4), np.float32)).sum())
        engine.step()
    sys.stdout.write("rank 0 is the last\n")
    sys.exit()
sys.stdout.write(f"rank {comm.rank} ends\n")
