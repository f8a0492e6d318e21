"""Run a lesson with a fault in the framework: planted_lesson.py FAULT lessons/NN_name.py options...

Each rank says on stderr with which code it ended.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import minizero as mz
from minizero.flat import Unit


def unreduced() -> None:
    """ZeRO-2 keeps its chunk of its own gradient: nothing is sent, and the loss falls all the same."""

    def reduce(self: mz.Engine, unit: Unit, gradient: Any) -> Any:
        return unit.own(gradient).copy()

    mz.Zero2.reduce = reduce  # type: ignore[method-assign]


def whole_gradients() -> None:
    """ZeRO-2 reduces like ZeRO-1: right bits, but too much held and sent."""
    mz.Zero2.reduce = mz.Zero1.reduce  # type: ignore[method-assign]


def one_bit() -> None:
    """On the last rank, one bit of one element of one moment is different, under ZeRO-2 only."""
    right = mz.Engine.gather_optimizer_state

    def wrong(self: mz.Engine) -> Any:
        state = right(self)
        if type(self) is mz.Zero2 and self.comm.rank == self.comm.size - 1:
            state["layers.3.bias"]["exp_avg_sq"].view(np.uint32)[-1] ^= 1
        return state

    mz.Engine.gather_optimizer_state = wrong  # type: ignore[method-assign]


def main() -> None:
    fault, script, *options = sys.argv[1:]
    {"unreduced": unreduced, "whole_gradients": whole_gradients, "one_bit": one_bit}[fault]()
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *options]
    code: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    sys.stderr.write(f"rank {MPI.COMM_WORLD.rank} ended with {code}\n")
    sys.exit(code)


main()
