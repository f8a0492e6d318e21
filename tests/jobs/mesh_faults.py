"""Would the checks of meshes notice? Faults are planted one by one on a mesh of 2×2×2; the right verdicts turn red.

    mpirun -n 8 python tests/jobs/mesh_faults.py ["name of a fault" ...]

    truth      weights after a step, against one process in float64
    norm       of the mean gradient, likewise
    bits       ZeRO-1 with GPipe against DP with 1F1B
    replicas   what all tensor-parallel ranks hold is the same on them
    live       micro-batches alive on a stage under 1F1B
    refused    an error instead of a training

Rank 0 prints a line of JSON for each: the verdicts that are red on some rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
from mesh_models import Problem, build, errors, flat, loss_of, train
from mesh_sweep import Watched, same_on_tp_ranks

import minizero as mz
from minizero import engine as engines
from minizero import nn, point
from minizero.autograd import Tensor
from minizero.backend import xp
from minizero.pipeline import Do, gpipe, one_f_one_b
from minizero.tensor_parallel import ColumnParallel, RowParallel, Slice, Split
from oracle import Oracle, same_bits

world = mz.Communicator()
MESH = mz.Mesh(world, 2, 2, 2)
PROBLEM = Problem("gpt", 2, dropout=0.2)
STEPS, K, CLIP = 1, 3, 0.05
Patch = tuple[Any, str, Any]  # owner, name, what is put there
FAULTS: dict[str, Callable[[], Sequence[Patch]]] = {"none": lambda: []}


def fault(name: str) -> Callable[[Callable[[], Sequence[Patch]]], None]:
    def enter(patches: Callable[[], Sequence[Patch]]) -> None:
        FAULTS[name] = patches

    return enter


@fault("the norm counts what all tp ranks hold tp times")
def _() -> Sequence[Patch]:
    return [(MESH.dp, "counts_copies", True)]


@fault("the norm is that of the own part of the model")
def _() -> Sequence[Patch]:
    return [(engines, "norm_of", lambda comm, squares: float(np.sqrt(squares.sum())))]


@fault("no all-reduce in the backward of the entrance")
def _() -> Sequence[Patch]:
    return [(Split, "enter", lambda split: lambda x: x)]


@fault("only one layer's entrance has no all-reduce")
def _() -> Sequence[Patch]:
    def forward(layer: Any, x: Any) -> Tensor:
        return nn.Linear.forward(layer, x)

    return [(ColumnParallel, "forward", forward)]


@fault("no all-reduce after a row-parallel layer")
def _() -> Sequence[Patch]:
    return [(Split, "leave", lambda split: lambda x: x)]


@fault("the gradient is added up over tp ranks behind a row-parallel layer, too")
def _() -> Sequence[Patch]:
    leave = Split.leave

    def both(split: Split) -> Any:
        after, before = leave(split), split.enter()
        return lambda x: after(before(x)) if x.requires_grad else after(x)

    return [(Split, "leave", both)]


@fault("a row-parallel layer adds its bias on every rank")
def _() -> Sequence[Patch]:
    def forward(layer: Any, x: Any) -> Tensor:
        return layer.leave(nn.Linear.forward(layer, x))

    return [(RowParallel, "forward", forward)]


@fault("all tp ranks draw the same slice")
def _() -> Sequence[Patch]:
    fill = Slice.fill

    def first(parameter: Slice, flat: Any, seed: int) -> None:
        part, parameter.part = parameter.part, (0, parameter.part[1])
        fill(parameter, flat, seed)
        parameter.part = part

    return [(Slice, "fill", first)]


@fault("slices are drawn by their own shapes")
def _() -> Sequence[Patch]:
    return [(Slice, "fill", nn.Parameter.fill)]


@fault("the dp group is taken for the world")
def _() -> Sequence[Patch]:
    return [(MESH, "dp", world)]


@fault("the tp group is taken for the dp group")
def _() -> Sequence[Patch]:
    return [(MESH, "dp", MESH.tp)]


class OtherNoise(nn.Noise):
    def __init__(self, seed: int = 0, rank: int = 0) -> None:
        super().__init__(seed, world.rank)


@fault("every rank of the mesh has dropout of its own")
def _() -> Sequence[Patch]:
    return [(engines, "Noise", OtherNoise)]


@fault("each stage begins dropout's numbers anew")
def _() -> Sequence[Patch]:
    receive = mz.Pipeline.receive_activation

    def anew(self: mz.Pipeline, *args: Any) -> Any:
        found = receive(self, *args)
        self.engine.noise.call = 0
        return found

    return [(mz.Pipeline, "receive_activation", anew)]


@fault("dropout's micro-batch is the number of backwards so far")
def _() -> Sequence[Patch]:
    """As without a pipeline; under 1F1B and under GPipe other numbers."""
    forward = mz.Pipeline.run_forward

    def by_backwards(self: Any, i: int, *args: Any) -> None:
        start, self.start = self.start, self.engine._micro_batch - i
        forward(self, i, *args)
        self.start = start

    return [(mz.Pipeline, "run_forward", by_backwards)]


@fault("an inner stage forgets to wait for its gradient")
def _() -> Sequence[Patch]:
    receive = point.receive

    def ones(comm: Any, source: int, library: Any = xp) -> Any:
        found = receive(comm, source, library)
        return library.ones_like(found) if source > comm.rank else found

    return [(point, "receive", ones)]


@fault("an inner stage weighs by the examples once more")
def _() -> Sequence[Patch]:
    send = point.send

    def heavier(comm: Any, array: Any, to: int) -> None:
        send(comm, array * 8 if to < comm.rank else array, to)

    return [(point, "send", heavier)]


@fault("GPipe runs the backwards from the last to the first")
def _() -> Sequence[Patch]:
    def reverse(stage: int, stages: int, k: int) -> list[Do]:
        return [Do("F", i) for i in range(k)] + [Do("B", i) for i in reversed(range(k))]

    return [(sys.modules[__name__], "gpipe", reverse)]


@fault("1F1B in name only: all forwards first")
def _() -> Sequence[Patch]:
    return [(sys.modules[__name__], "one_f_one_b", gpipe)]


@fault("what a backward has used is kept")
def _() -> Sequence[Patch]:
    kept: list[Any] = []
    backward = mz.Pipeline.run_backward

    def keep(self: Any, i: int, *args: Any) -> None:
        kept.append(self.live[i])
        backward(self, i, *args)

    return [(mz.Pipeline, "run_backward", keep)]


@fault("the last stage leaves out its last function")
def _() -> Sequence[Patch]:
    class Shifted(mz.Stage):
        def __init__(self, model: nn.Module, comm: mz.Communicator) -> None:
            super().__init__(model, comm)
            if comm.rank == 1:
                run = self._inside()
                self._inside = lambda: (run[0][:-1], run[1])

    return [(mz, "Stage", Shifted)]


def verdicts(truth: Oracle, norms: list[float]) -> set[str]:
    red, found = set[str](), list[dict[str, Any]]()
    for stage, order in ((mz.DataParallel, one_f_one_b), (mz.Zero1, gpipe)):
        try:
            run: Any = build(stage, PROBLEM, mz.SGD(0.5, momentum=0.9), MESH, "float64", Watched, order=order)
            for step, norm in enumerate(norms):
                train(run, PROBLEM, step, "float64", K)
                if not abs(run.engine.clip_grad_norm(CLIP) - norm) < 1e-12 * norm:
                    red.add("norm")
                run.engine.step()
        except (ValueError, RuntimeError, mz.CollectiveError):
            return {"refused"}
        found.append(flat(run.engine))
        if any(not error < 1e-12 for error in errors(run.engine, truth.weights).values()):
            red.add("truth")
        try:
            same_on_tp_ranks(run.engine, MESH, "")
        except AssertionError:
            red.add("replicas")
        if stage is mz.DataParallel and run.most != 2 - MESH.pp.rank:
            red.add("live")
    if not all(same_bits(x, found[1][name]) for name, x in found[0].items()):
        red.add("bits")
    return red


def main(chosen: list[str]) -> None:
    truth, norms = Oracle(PROBLEM.model("float64"), mz.SGD(0.5, momentum=0.9), 2), list[float]()
    for step in range(STEPS):
        batches = [PROBLEM.micro_batches(step, "float64", rank, 2, K) for rank in range(2)]
        counts = [[len(y) for _, y in batch] for batch in batches]
        norms.append(truth.step(loss_of, batches, examples=counts, clip=CLIP) or 0.0)
    for name in chosen or FAULTS:
        with ExitStack() as stack:
            for owner, attribute, new in FAULTS[name]():
                stack.enter_context(mock.patch.object(owner, attribute, new))
            red = verdicts(truth, norms)
        everywhere = set().union(*world.mpi.allgather(red))
        if world.rank == 0:
            print(json.dumps({"fault": name, "red": sorted(everywhere)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
