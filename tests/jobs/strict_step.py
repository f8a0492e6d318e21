"""On the stand-in for CuPy: what a step asks the device for, who has which device, and how messages travel.

STRICT_DEVICES=3 MINIZERO_BACKEND=cupy PYTHONPATH=.:tests/strict mpirun -n 5 python tests/jobs/strict_step.py
"""

from __future__ import annotations

import sys
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import clock

import minizero as mz
from minizero import backend, nn, ring, transport
from minizero import functional as F
from minizero.backend import to_host, xp
from minizero.job import local_rank
from minizero.transport import Direct, Staged

early = xp.ones(3)  # before there is a communicator
comm = mz.Communicator()
way: Any = comm._transport


def waits(work: Any) -> int:
    """How often `work` waits for a value of the device, beside messages."""
    before, inside = clock.reads, 0

    def counted(self: Any, message: Any) -> Any:
        nonlocal inside
        start = clock.reads
        result = outgoing(self, message)
        inside += clock.reads - start
        return result

    outgoing, type(way).outgoing = type(way).outgoing, counted
    work()
    type(way).outgoing = outgoing
    return clock.reads - before - inside


def check_devices() -> None:
    count = xp.cuda.runtime.getDeviceCount()
    assert early._device == local_rank() % count, f"rank {comm.rank} allocated on device {early._device}"
    assert comm.device == backend.device == f"gpu {local_rank() % count}"
    half = mz.Communicator(comm.mpi.Split(comm.rank // 2))
    assert cupy.cuda.Device().id == local_rank() % count and half.device == comm.device, "a part of the ranks moved"
    (early + xp.ones(3)).sum()


def check_waits() -> None:
    """One number per step: are all gradients finite? And one more where the norm is asked for."""
    generator = np.random.default_rng(comm.rank)
    tokens = generator.integers(0, 7, (3, 5))
    for stage in mz.STAGES:
        for here in (tokens, xp.asarray(tokens)):  # of the host, or of the device already
            for dtype in ("float32", "bfloat16"):
                model = nn.GPT(vocab=7, context=5, width=8, heads=2, layers=2, dropout=0.1, dtype=dtype)
                engine: Any = stage(model, mz.Adam(), comm)
                losses: list[mz.Tensor] = []
                for step in range(3):
                    where = f"{stage.__name__} {dtype}, step {step}"
                    found = waits(lambda: losses.append(F.cross_entropy(engine(here), here)))  # noqa: B023
                    assert found == 0, f"{where}: the forward waits {found} times"
                    found = waits(lambda: engine.backward(losses[-1]))  # noqa: B023
                    assert found == 0, f"{where}: the backward waits {found} times"
                    if step == 1:
                        found = waits(lambda: engine.clip_grad_norm(1.0))  # noqa: B023
                        assert found == 2, f"{where}: the norm takes {found} waits, not one and the step's"
                    found = waits(engine.step)
                    assert found == (step != 1), f"{where}: the step waits {found} times"
                assert all(np.isfinite(loss.item()) for loss in losses)


def check_messages() -> None:
    """Through the same pinned memory, again and again, whatever the size; and cut in pieces."""
    staged = type(way) is Staged
    assert staged == (not transport.cuda_aware()[0]) and type(way) in (Direct, Staged)
    for size in (0, 1, 1000, 10, 1000):
        send, recv = xp.full(size, comm.rank, np.uint8), xp.full(size, 99, np.uint8)
        comm.exchange(send, recv)
        send.fill(77)  # as soon as the call returns
        assert (to_host(recv) == comm.left).all(), f"{size} bytes"
    if staged:
        before = dict(way._pinned)
        assert {key: array.size for key, array in before.items()} == {"out": 1000, "in": 1000}
        landed = way.incoming(recv)
        way.arrived(landed, recv)
        assert clock.in_flight(landed.ctypes.data, 1), "the copy to the device is late"
        assert way.incoming(recv) is not None and not clock.in_flight(landed.ctypes.data, 1), "used again too early"
        assert all(way._pinned[key] is array for key, array in before.items()), "pinned memory is made anew"
    way.largest = 100
    for dtype in (*backend.DTYPES.values(), np.dtype("float16")):
        whole = xp.asarray(np.arange(33 * comm.size)).astype(dtype)
        part = xp.zeros_like(whole)
        own = slice(33 * comm.rank, 33 * comm.rank + 33)
        part[own] = whole[own]
        comm.traffic.clear()
        ring.all_gather(comm, part)
        assert to_host(part).tobytes() == to_host(whole).tobytes(), f"{dtype} in pieces of 100 bytes"
        assert comm.traffic == {"all_gather": 33 * dtype.itemsize * (comm.size - 1)}
    del way.largest


def check_ids() -> None:
    """Ids of the device are not read back: a bad one makes what follows NaN, and the step refuses."""
    weight = xp.ones((4, 2), np.float32)
    for bad in (4, -1, 1000):
        rows = to_host(F.embedding(weight, xp.asarray([1, bad])).data)
        assert np.isnan(rows[1]).all() and (rows[0] == 1).all(), rows
        assert np.isnan(F.cross_entropy(weight, xp.asarray([0, 1, bad, 0])).item())
        try:
            F.embedding(weight, np.array([1, bad]))
        except IndexError as error:
            assert f"found {bad}" in str(error)
        else:
            raise AssertionError("an id of the host was not looked at")
    engine = mz.Zero3(nn.Sequential(nn.Embedding(4, 3)), mz.SGD(0.1), comm)
    for tokens, targets in (([0, 1], [0, 9]), ([0, 9], [0, 1]), ([0, 1], [0, -1])):
        engine.backward(F.cross_entropy(engine(xp.asarray(tokens)), xp.asarray(targets)))
        try:
            engine.step()
        except FloatingPointError as error:
            assert "layers.0.weight is not finite" in str(error), error
        else:
            raise AssertionError(f"a step with {tokens}, {targets} was made")
        engine.zero_grad()
    engine.backward(F.cross_entropy(engine(xp.asarray([0, 1])), xp.asarray([0, 1])))
    engine.step()


def check_empty() -> None:
    """Where a rank has no examples, CuPy finds no largest element: nobody may ask."""
    none = xp.zeros((0, 3), np.float32)
    for function in (F.softmax, F.log_softmax):
        assert function(none).shape == (0, 3)
    assert F.cross_entropy(none, np.zeros(0, int)).item() == 0 and F.max(none, axis=1).shape == (0,)
    try:
        F.max(none, axis=0)
    except ValueError:
        return
    raise AssertionError("there is no largest of nothing")


def check_pinned_memory() -> None:
    """It is not given back while a copy from it is under way."""
    way, array = Staged(patient=False), xp.zeros(8, np.uint8)
    landing = way.incoming(array)
    landing[:] = 1
    way.arrived(landing, array)
    assert clock.in_flight(landing.ctypes.data, 8)
    del way
    assert not clock.in_flight(landing.ctypes.data, 8), "pinned memory was let go of while a copy read it"


check_devices()
check_messages()
check_pinned_memory()
check_ids()
check_empty()
check_waits()
with cupyx.allow_synchronize(False):
    xp.ones(3).sum()
if comm.rank == 0:
    sys.stdout.write("all well\n")
