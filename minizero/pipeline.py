"""How do ranks share the depth of a model?

Each stage has some consecutive layers. It receives activations from the left, sends its own to the right, and the
gradients come back. A batch is cut in k micro-batches, so that all stages have something to do:

    GPipe       stage 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3       all forwards, then all backwards: k micro-batches are
                stage 1   .  F0 F1 F2 F3 B0 B1 B2 B3 .        alive at once (Huang et al. 2019, arXiv 1811.06965)

    1F1B        stage 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3       a backward as soon as one can run: on stage i of p no more
                stage 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .        than p - i are alive (Narayanan et al. 2021, arXiv
                                                              2104.04473, section 2.2)

Both wait equally long: p - 1 turns at the beginning and at the end. Both run the backwards in the same order, which is
why they have the same bits. Each stage follows its own list of instructions, and messages do the rest.

Per micro-batch a boundary costs one activation to the right and one gradient to the left.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from . import point
from .agreement import exchange_facts, summary
from .autograd import Tensor, no_grad
from .backend import to_host, xp
from .comm import Communicator
from .engine import Engine
from .nn import Module


class Do(NamedTuple):
    """One instruction: run "F" (forward) or "B" (backward) of a micro-batch."""

    what: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.what}{self.micro_batch}"


Order = Callable[[int, int, int], list[Do]]  # (stage, stages, micro-batches) -> what that stage does


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Do]:
    """All forwards, then all backwards."""
    every = range(micro_batches)
    return [Do("F", i) for i in every] + [Do("B", i) for i in every]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Do]:
    """As many forwards as it takes until the first gradient can come back, then backward and forward in turn."""
    ahead = min(stages - stage, micro_batches)
    found = [Do("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        found.append(Do("B", i))
        if ahead + i < micro_batches:
            found.append(Do("F", ahead + i))
    return found


def timeline(order: Order, stages: int, micro_batches: int) -> list[list[Do | None]]:
    """What each stage does in each turn, None: it waits. As if every instruction took one turn, and messages none."""
    left = [order(stage, stages, micro_batches) for stage in range(stages)]
    turns: list[list[Do | None]] = [[] for _ in left]
    done = set[tuple[int, Do]]()
    while any(left):
        now = []
        for stage, todo in enumerate(left):
            do = todo[0] if todo else None
            before = do and (stage + (1 if do.what == "B" else -1), do)  # who must have done the same before
            ready = before and (not 0 <= before[0] < stages or before in done)
            turns[stage].append(do if ready else None)
            now += [(stage, todo.pop(0))] if ready else []
        if not now:
            waiting = ", ".join(f"{todo[0]} of stage {stage}" for stage, todo in enumerate(left) if todo)
            raise ValueError(f"for ever these wait: {waiting}")
        done.update(now)
    return turns


class Stage(Module):
    """The layers of `model` that are this rank's, under the names that they have in the whole model.

    Args:
        model: a model with `pieces`, no values yet; the same on every rank. (Only this stage's will be drawn.)
        comm: the ranks of the pipeline, first stage first. Each gets consecutive pieces, as evenly as possible.

    Raises ValueError, on all ranks, where there are fewer pieces than ranks, a stage has no parameter to train, or a
    parameter is in several stages, as the weight of a tied embedding is: build the model with `tied=False`.
    """

    def __init__(self, model: Module, comm: Communicator) -> None:
        pieces, modules = model.pieces(), dict(model.named_modules())
        if len(pieces) < comm.size:
            raise ValueError(f"a model of {len(pieces)} pieces cannot be cut in a pipeline of {comm.size} stages")
        bounds = [len(pieces) * i // comm.size for i in range(comm.size + 1)]
        stages = [pieces[a:b] for a, b in itertools.pairwise(bounds)]
        held = [{p for names, _ in stage for each in names for p in modules[each].parameters()} for stage in stages]
        for name, parameter in model.named_parameters():
            users = [i for i, parameters in enumerate(held) if parameter in parameters]
            if len(users) != 1:
                raise ValueError(f"{name} is used by the stages {users} of a pipeline, and must be by one "
                                 "(of a tied embedding: build the model with tied=False)")  # fmt: skip
        for i, parameters in enumerate(held):
            if not any(parameter.requires_grad for parameter in parameters):
                raise ValueError(f"stage {i} of {comm.size} has no parameter to train: fewer stages, or other pieces")
        self.seed, self.whole = model.seed, summary(model)
        for path in (path for names, _ in stages[comm.rank] for path in names):
            setattr(self, path, modules[path])  # "blocks.3", dot included: its parameters keep their paths
        functions = [function for _, several in stages[comm.rank] for function in several]
        mine, units = held[comm.rank], model.units()
        inside = functions, [(name, module) for name, module in units if mine.issuperset(module.parameters())]
        self._inside: Callable[[], tuple[list[Any], list[tuple[str, Module]]]] = lambda: inside  # no attribute of ours

    def forward(self, x: Any) -> Tensor:
        for function in self._inside()[0]:
            x = function(x)
        return x

    def units(self) -> list[tuple[str, Module]]:
        return self._inside()[1]


class Pipeline:
    """Trains an engine whose model is this rank's `Stage`.

        engine = mz.Zero1(mz.Stage(model, mesh.pp), mz.Adam(), mesh.dp)
        pipeline = mz.Pipeline(engine, mesh.pp, F.cross_entropy)
        for batch in batches:                        # [(x, y), ...]: the micro-batches of this dp rank
            losses = pipeline.backward(batch)        # on the last stage; elsewhere an empty list
            engine.step()

    Args:
        comm: the ranks of the pipeline. loss: called on the last stage as loss(output, y).
        order: `one_f_one_b` or `gpipe`, or a list of instructions of your own.
        accumulate: add the micro-batches' gradients locally, and reduce their sum over the dp group in the last one
            (`engine.no_sync`). Otherwise each is reduced as it finishes.
    """

    def __init__(
        self, engine: Engine, comm: Communicator, loss: Callable[[Tensor, Any], Tensor], order: Order = one_f_one_b,
        accumulate: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.comm, self.loss, self.order, self.accumulate = engine, comm, loss, order, accumulate
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self.live: dict[int, tuple[Any, Tensor]] = {}  # micro-batches between forward and backward: input and output

    def backward(self, batch: Iterable[tuple[Any, Any]], examples: Sequence[int] | None = None) -> list[Tensor]:
        """Forward and backward of all micro-batches. Collective over the pipeline, and over the engine's group.

        Args:
            batch: (x, y) per micro-batch, the same on all stages of a pipeline: the first uses x, the last y. Of
                equal length on all ranks of the mesh.
            examples: of how many examples each loss is the mean, where they differ: as in `Engine.backward`.

        Returns the losses on the last stage, in order; nothing on the others. Raises ValueError, on all ranks of the
        mesh, for batches that do not fit together; on one, for an order that does not run each micro-batch once.
        """
        batch = list(batch)
        self.agree(batch, examples)
        self.start, self.losses = self.engine.noise.micro_batch, list[Tensor]()
        try:
            for do in self.order(self.comm.rank, self.comm.size, len(batch)):
                n = None if examples is None else examples[do.micro_batch]
                if do.what == "F":
                    self.run_forward(do.micro_batch, batch, n)
                else:
                    waits = self.accumulate and do.micro_batch < len(batch) - 1
                    with self.engine.no_sync() if waits else nullcontext():
                        self.run_backward(do.micro_batch, n)
        finally:
            self.live.clear()
        return self.losses

    def agree(self, batch: list[tuple[Any, Any]], examples: Sequence[int] | None) -> None:
        """Ranks with fewer micro-batches would leave the others waiting. Collective over the mesh, if there is one."""
        k, mesh = len(batch), self.engine.comm.beyond
        if not k or (examples is not None and len(examples) != k):
            raise ValueError(f"pipeline: {k} micro-batches and examples={examples}: at least one, and a number of each")
        todo = self.order(self.comm.rank, self.comm.size, k)
        once = sorted(todo) == sorted(gpipe(0, 1, k))
        if not once or any(todo.index(Do("F", i)) > todo.index(Do("B", i)) for i in range(k)):
            raise ValueError(f"pipeline: {todo} does not run each of {k} micro-batches forward and then backward once")
        if not mesh:
            return
        used = [part for x, y in batch for part in [x] * self.first + [y] * self.last]
        facts = exchange_facts(mesh, k, self.engine.comm.rank, self.comm.rank, checksum([*used, examples]))
        if (facts[:, 0] != k).any():
            raise ValueError(f"pipeline: ranks of the mesh have {facts[:, 0].astype(int).tolist()} micro-batches: all "
                             "must have equally many")  # fmt: skip
        rows = [tuple(row) for row in facts[:, 1:].tolist()]
        wrong = [rank for rank, row in enumerate(rows) if any(row[:2] == each[:2] and row != each for each in rows)]
        if wrong:
            raise ValueError(
                f"pipeline: ranks {wrong} of the mesh have not the same batch as others at the same place along dp and "
                "pp, with whom they share the arithmetic of each layer"
            )

    def run_forward(self, i: int, batch: Sequence[tuple[Any, Any]], examples: int | None) -> None:
        self.engine.noise.at(self.engine.steps, self.start + i)
        facts = [len(batch), i, -1 if examples is None else examples]
        x = batch[i][0] if self.first else self.receive_activation(i, facts)
        y = self.engine(x)
        if self.last:
            y = self.loss(y, batch[i][1])
        else:
            self.send_activation(i, y, facts)
        self.live[i] = x, y

    def run_backward(self, i: int, examples: int | None) -> None:
        x, y = self.live.pop(i)
        if self.last:
            self.engine.backward(y, examples=examples)
            self.losses.append(y)
        else:
            with self.comm.label("pipeline", 2 * i + 1, NAMES):
                gradient = point.receive(self.comm, self.comm.rank + 1).reshape(y.shape)
            self.engine.backward(y, gradient=gradient, examples=examples)
        if not self.first:
            gradient = xp.zeros(x.shape, x.dtype) if x.grad is None else xp.ascontiguousarray(x.grad)
            with self.comm.label("pipeline", 2 * i + 1, NAMES):
                point.send(self.comm, gradient, self.comm.rank - 1)

    def __call__(self, x: Any) -> Tensor | None:
        """The whole model's forward, without a backward: the result on the last stage. Collective over the pipeline."""
        with no_grad():
            y = self.engine(x if self.first else self.receive_activation(0, [0, 0, 0]))
        if self.last:
            return y
        self.send_activation(0, y, [0, 0, 0])
        return None

    def send_activation(self, i: int, y: Tensor, facts: list[int]) -> None:
        """Ahead goes a message with its shape, what the stages must agree on, and where dropout's numbers are."""
        with self.comm.label("control", 2 * i, NAMES):
            point.send(self.comm, np.array([*facts, self.engine.noise.call, *y.shape]), self.comm.rank + 1)
        with self.comm.label("pipeline", 2 * i, NAMES):
            point.send(self.comm, xp.ascontiguousarray(y.data), self.comm.rank + 1)

    def receive_activation(self, i: int, facts: list[int]) -> Tensor:
        left = self.comm.rank - 1
        with self.comm.label("control", 2 * i, NAMES):
            theirs, shape = np.split(point.receive(self.comm, left, np), [len(facts) + 1])
        if theirs[:-1].tolist() != facts:
            reason = (f"pipeline: all stages must have the same batch, but stage {left} says {theirs[:-1].tolist()}, "
                      f"stage {self.comm.rank} {facts}: so many micro-batches, the number of this one, and of how many "
                      "examples its loss is the mean (-1: not said)")  # fmt: skip
            point.fail(self.comm, reason)
        self.engine.noise.call = int(theirs[-1])
        with self.comm.label("pipeline", 2 * i, NAMES):
            x = Tensor.of(point.receive(self.comm, left).reshape(shape.tolist()))
        x.requires_grad = True
        return x


def checksum(values: list[Any]) -> int:
    """Of arrays and tensors by shape and bytes, of other things as they print."""
    found = 0
    for value in values:
        array = value.data if isinstance(value, Tensor) else value
        if isinstance(array, np.ndarray | xp.ndarray):
            found = zlib.crc32(to_host(array).tobytes(), zlib.crc32(str(array.shape).encode(), found))
        else:
            found = zlib.crc32(str(array).encode(), found)
    return found


class _Names(Sequence[str]):
    """What messages are about: the name of each unit number."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: Any) -> Any:
        return f"{('forward', 'backward')[number % 2]} of micro-batch {number // 2}"


NAMES = _Names()
