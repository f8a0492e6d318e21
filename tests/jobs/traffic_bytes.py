"""Does each rank send the bytes of the table: by operation, and as MPI is handed them?

mpirun -n 5 python tests/jobs/traffic_bytes.py
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from traffic_table import Bytes, control, nonzero, per_step, wire, wrapping

import minizero as mz
from minizero import functional as F
from minizero import nn

comm = mz.Communicator()
VOCAB, TIME, WIDTH = 11, 6, 8
BLOCK = 2 * 2 * WIDTH + 4 * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 4 * WIDTH + (4 * WIDTH + 1) * WIDTH


class CountingMPI:
    """Stands in for `comm.mpi`: counts what MPI is handed to send, and the room that it is given to receive."""

    def __init__(self, mpi: MPI.Comm) -> None:
        self.mpi, self.sent, self.received = mpi, 0, 0

    def Isend(self, send: Any, right: int, tag: int) -> MPI.Request:  # noqa: N802  (MPI's own names)
        self._count_send(send, right)
        return self.mpi.Isend(send, right, tag)

    def Irecv(self, recv: Any, left: int, tag: int) -> MPI.Request:  # noqa: N802
        self.received += recv[0].nbytes
        return self.mpi.Irecv(recv, left, tag)

    def Sendrecv(self, send: Any, right: int, tag: int, recv: Any, left: int, *rest: Any) -> None:  # noqa: N802
        self._count_send(send, right)
        self.received += recv[0].nbytes
        self.mpi.Sendrecv(send, right, tag, recv, left, *rest)

    def _count_send(self, send: Any, right: int) -> None:
        assert right == (comm.rank + 1) % comm.size and send[1] == MPI.BYTE, f"rank {comm.rank} sent to {right}"
        self.sent += send[0].nbytes

    def __getattr__(self, name: str) -> Any:
        if name in ("Probe", "Iprobe"):  # they ask, and move nothing
            return getattr(self.mpi, name)
        raise AssertionError(
            f"rank {comm.rank}: nothing but messages round the ring is counted, and MPI's {name} was used"
        )


@dataclass
class Case:
    name: str
    make: Callable[[str], nn.Module]
    batch: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    trained: list[int]  # elements of each trained unit
    parameters: int  # trained ones
    frozen: list[int] = field(default_factory=list)  # elements of each frozen unit
    frozen_gathers: int = 2  # per forward and backward, under ZeRO-3


def mlp(dtype: str, freeze: Callable[[nn.MLP], list[nn.Parameter]] = lambda model: []) -> nn.Module:
    model = nn.MLP([7, 5, 9, 3], dtype=dtype)
    for parameter in freeze(model):
        parameter.requires_grad = False
    return model


def gpt(dtype: str, tied: bool) -> nn.Module:
    return nn.GPT(vocab=VOCAB, context=TIME, width=WIDTH, heads=2, layers=1, tied=tied, dtype=dtype)


VECTORS = (np.ones((2, 7), "float32"), np.zeros(2, "int64"))
TOKENS = (np.arange(2 * TIME).reshape(2, TIME) % VOCAB, np.zeros((2, TIME), "int64"))
CASES = [
    Case("MLP", mlp, VECTORS, [40, 54, 30], 6),
    Case("middle layer frozen", lambda d: mlp(d, lambda m: m.layers[1].parameters()), VECTORS, [40, 30], 4, [54]),
    Case("first layer frozen", lambda d: mlp(d, lambda m: m.layers[0].parameters()), VECTORS, [54, 30], 4, [40], 1),
    Case("one bias frozen", lambda d: mlp(d, lambda m: [m.parameters()[3]]), VECTORS, [40, 45, 30], 5, [9]),
    Case("GPT, tied", lambda d: gpt(d, True), TOKENS, [VOCAB * WIDTH, TIME * WIDTH, BLOCK, 2 * WIDTH], 20),
    Case("GPT, untied", lambda d: gpt(d, False), TOKENS, [VOCAB * WIDTH] * 2 + [TIME * WIDTH, BLOCK, 2 * WIDTH], 21),
]  # fmt: skip


def counted(work: Callable[..., Any], *args: Any) -> tuple[Bytes, Any]:
    """What `work(*args)` sends, by operation, and its result. MPI must have been handed as many bytes."""
    comm.traffic.clear()
    counter: Any = CountingMPI(comm.mpi)
    comm.mpi = counter
    try:
        result = work(*args)
    finally:
        comm.mpi = counter.mpi
    assert counter.sent == counter.received == sum(comm.traffic.values()), (
        f"rank {comm.rank}: MPI was handed {counter.sent} bytes to send and room for {counter.received}, "
        f"the counter says {dict(comm.traffic)}"
    )
    return nonzero(comm.traffic), result


def one_step(engine: mz.Engine, case: Case, k: int, no_sync: bool, clip: bool) -> None:
    x, y = case.batch
    for micro_batch in range(k):
        if no_sync and micro_batch < k - 1:
            with engine.no_sync():
                engine.backward(F.cross_entropy(engine(x), y))
        else:
            engine.backward(F.cross_entropy(engine(x), y))
    if clip:
        engine.clip_grad_norm(0.01)
    engine.step()


def evaluate(engine: mz.Engine, case: Case) -> None:
    with mz.no_grad():
        engine(case.batch[0])


def check(stage: type[mz.Engine], case: Case, dtype: str) -> Counter[tuple[int, bool]]:
    """All that an engine sends in its life. Returns the totals of its steps, control left out, by (k, no_sync)."""
    where, n, name = f"rank {comm.rank}, {case.name}, {dtype}, {stage.__name__}", comm.size, stage.__name__
    trained, frozen = (wire(units, 2 if dtype == "bfloat16" else 4, n) for units in (case.trained, case.frozen))
    sent, engine = counted(stage, case.make(dtype), mz.Adam(), comm)
    assert sent == nonzero(wrapping(trained + frozen, n)), f"{where}, wrapping: sent {sent}"

    totals: Counter[tuple[int, bool]] = Counter()
    for k, no_sync, clip in KINDS:
        sent, _ = counted(one_step, engine, case, k, no_sync, clip)
        expected = per_step(name, trained, n, k, no_sync, k * case.frozen_gathers * frozen)
        expected["control"] = control(n, case.parameters, clip)
        assert sent == nonzero(expected), f"{where}, {k=}, {no_sync=}, {clip=}: sent {sent}, not {expected}"
        totals[k, no_sync] = sum(sent.values()) - sent.get("control", 0)

    gathers = (trained + frozen) * (stage is mz.Zero3)
    sent, _ = counted(evaluate, engine, case)
    assert sent == nonzero({"all_gather": gathers}), f"{where}, evaluation: sent {sent}"
    sent, _ = counted(engine.gather_parameters)
    assert sent == nonzero({"gather_parameters": gathers}), f"{where}, gather_parameters: sent {sent}"
    moments = 2 * 2 * wire(case.trained, 4, n) * (stage is not mz.DataParallel)  # two moments, one all-reduce each
    sent, _ = counted(engine.gather_optimizer_state)
    facts = 8 * (n - 1) * sum(unit.trainable for unit in engine.units)
    expected = nonzero({"gather_parameters": moments, "control": facts})
    assert sent == expected, f"{where}, gather_optimizer_state: sent {sent}, not {expected}"
    return totals


KINDS = ((1, False, False), (3, False, True), (3, True, False))  # k, no_sync, clip
steps = 0
for case in CASES:
    for dtype in ("float32", "bfloat16"):
        if dtype == "float32" or case.name in ("MLP", "middle layer frozen", "GPT, tied"):
            totals = [check(stage, case, dtype) for stage in mz.STAGES]
            steps += sum(map(len, totals))
            if not case.frozen:
                dp, zero1, zero2, zero3 = (total[1, False] for total in totals)
                assert comm.size == 1 or dp == zero2 < zero1 == zero3, f"k = 1: {totals}"


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> mz.Tensor:
        return self.layer(F.relu(self.layer(x)))


ones = np.ones((2, 6), "float32")
twice = mz.Zero3(Twice(), mz.Adam(), comm)
sent, _ = counted(lambda: twice.backward(F.mean(twice(ones))))
layer = wire([42], 4, comm.size)
assert sent == nonzero({"all_gather": 3 * layer, "reduce_scatter": layer}), f"used twice, reduced once: sent {sent}"

if comm.rank == 0:
    print(f"{steps} steps counted")
