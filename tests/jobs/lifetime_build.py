"""How much memory does wrapping a model need under ZeRO-3? Its chunks, and one whole unit in passing.

mpirun -n 3 python tests/jobs/lifetime_build.py float32 late|early

`early` draws all parameters before wrapping: what late drawing is there to avoid. Rank 0 prints peak and bound.
"""

import sys
import tracemalloc

import minizero as mz
from minizero import nn, ring
from minizero.parameter import DRAW_BLOCK

WIDTH, LAYERS = 600, 8
dtype, when = sys.argv[1:]
comm = mz.Communicator()
unit = (WIDTH * WIDTH + WIDTH) * (2 if dtype == "bfloat16" else 4)
block = 24 * DRAW_BLOCK  # a block of the draw: float64 numbers, their scaled copy, float32 ones
if dtype == "bfloat16":  # scratch for additions, which is made once and kept: its first use is not building
    ring.all_reduce(comm, mz.backend.xp.zeros(comm.size, "bfloat16"))

tracemalloc.start()
model = nn.MLP([WIDTH] * (LAYERS + 1), dtype=dtype)
if when == "early":
    model.materialise()
engine = mz.Zero3(model, mz.Adam(), comm)
held, peak = tracemalloc.get_traced_memory()

chunks = LAYERS * unit // comm.size
bound = chunks + unit + unit // comm.size + block  # the ring's buffer for an arriving chunk is a third part
assert engine.memory()["weights"] == chunks, f"rank {comm.rank}: holds {engine.memory()}, not {chunks}"
assert held < chunks + unit // comm.size + block, f"rank {comm.rank}: {held} bytes stay, its chunks are {chunks}"
tops = comm.mpi.allgather(peak)
assert min(tops) > chunks + unit, f"peaks {tops}: less than the chunks and a unit, {chunks + unit}, cannot be"
if comm.rank == 0:
    print("peak", max(tops), "bound", bound, "everything", LAYERS * unit)
