"""In a training on a mesh, rank `who` leaves (`how`) in the forward of its second micro-batch: the job must end.

mpirun -n 8 python tests/jobs/mesh_leave.py how who dp pp tp
"""

import os
import signal
import sys
import time
from typing import Any

from mesh_models import Problem, build, train

import minizero as mz

how, who, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
comm = mz.Communicator()
mesh = mz.Mesh(comm, *sizes)


class Leaving(mz.Pipeline):
    def run_forward(self, i: int, *args: Any) -> None:
        if i == 1 and comm.rank == who and self.engine.steps == 1:
            os.write(1, f"leaving at {time.time()}\n".encode())
            if how == "raises":
                raise KeyError("the reason")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(3)
        super().run_forward(i, *args)


problem = Problem("gpt", mesh.pp.size)
pipeline = build(mz.Zero2, problem, mz.Adam(), mesh, "float32", Leaving)
for step in range(3):
    train(pipeline, problem, step, "float32")
    pipeline.engine.step()
