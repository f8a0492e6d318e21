"""The ring against sums written out by hand, bit for bit; and what each call costs in bytes, memory and copies.

Every rank can make every rank's data, and so adds up what it should receive on its own. Data differ by rank and
by element: a ring that sums the wrong chunk, or in another order, gives other bits (`order_matters` makes sure).
"""

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import expect
import ml_dtypes
import numpy as np

import minizero as mz
from minizero import backend, ring
from minizero.backend import to_host, xp

Array = np.ndarray[Any, Any]
ON_HOST = backend.name == "numpy"
bfloat16 = np.dtype(ml_dtypes.bfloat16)
world = mz.Communicator()
N = world.size
KIB64, MIB16 = 1 << 16, 1 << 24


def bits(array: Array) -> Array:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def same(got: backend.Array, wanted: Array, what: str) -> None:
    got = to_host(got)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{what}: {got.dtype}{got.shape}"
    different = np.flatnonzero(bits(got) != bits(wanted))
    assert not different.size, (
        f"{what}: N={N}, rank {world.rank}: {different.size} of {got.size} elements differ, the first at "
        f"{different[0]}: {got[different[0]]} instead of {wanted[different[0]]}"
    )


def data(member: int, count: int, dtype: Any) -> Array:
    """What rank `member` starts with: values of many magnitudes, another for every element and rank."""
    if np.dtype(dtype).kind in "iu":
        return ((np.arange(count, dtype=dtype) + 1) * (member + 3) * 7_919) % 1_000_003
    i = np.arange(min(count, 65_537), dtype=np.float64)  # a prime: repeated, it does not make chunks alike
    return np.resize((np.cos(i * 1.7 + member * 2.3) * np.exp(3 * np.sin(i * 0.37 + member))).astype(dtype), count)


def add(a: Array, b: Array) -> Array:
    return (a.astype(np.float32) + b.astype(np.float32)).astype(bfloat16) if a.dtype == bfloat16 else a + b


def summed(parts: list[Array], direction: int = 1) -> Array:
    """The documented sum: chunk c in the order of ranks c+1, c+2, ..., c."""
    n, length = len(parts), parts[0].size // len(parts)
    result = np.empty_like(parts[0])
    for c in range(n):
        chunk = slice(c * length, (c + 1) * length)
        order = [(c + direction * k) % n for k in range(1, n + 1)] if direction > 0 else [(c - k) % n for k in range(n)]
        total = parts[order[0]][chunk]
        for member in order[1:]:
            total = add(total, parts[member][chunk])
        result[chunk] = total
    return result


def check_sums(comm: mz.Communicator, per_chunk: int, dtype: Any, what: str = "") -> None:
    n, count = comm.size, per_chunk * comm.size
    what = f"{what} {np.dtype(dtype)} ({n} x {per_chunk})"
    parts = [data(member, count, dtype) for member in range(n)]
    wanted = summed(parts)
    own = slice(comm.rank * per_chunk, (comm.rank + 1) * per_chunk)

    vector = xp.array(parts[comm.rank])
    chunk = ring.reduce_scatter(comm, vector)
    same(chunk, wanted[own], f"reduce_scatter {what}")
    assert not per_chunk or xp.shares_memory(chunk, vector), f"reduce_scatter {what}: not in place"
    kept = np.array(to_host(chunk))

    again = xp.array(parts[comm.rank])
    whole = ring.all_reduce(comm, again)
    same(whole, wanted, f"all_reduce {what}")
    assert whole is again, f"all_reduce {what}: not in place"
    same(chunk, kept, f"reduce_scatter {what}: its result was changed by a later call")

    check_gather(comm, per_chunk, dtype, what)


def check_gather(comm: mz.Communicator, per_chunk: int, dtype: Any, what: str = "") -> None:
    count = per_chunk * comm.size
    own = slice(comm.rank * per_chunk, (comm.rank + 1) * per_chunk)
    vector = xp.full(count, 77, dtype)
    vector[own] = xp.asarray(data(comm.rank, count, dtype)[own])
    wanted = np.concatenate([data(m, count, dtype)[m * per_chunk : (m + 1) * per_chunk] for m in range(comm.size)])
    assert ring.all_gather(comm, vector) is vector
    same(vector, wanted, f"all_gather {what}")


def check_broadcast(comm: mz.Communicator, dtype: Any) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -1.5, 2.0**-126, 1e-40]
    wanted = np.resize(np.array(special), 16 * comm.size).astype(dtype)
    payload = {2: 0x7FC5, 4: 0x7FA54321, 8: 0x7FF4000012345678}[wanted.itemsize]
    bits(wanted)[3] = payload  # a NaN with something in it, in some dtypes a signalling one
    vector = xp.array(wanted)
    if comm.rank > 0:
        vector[:] = np.nan if comm.rank % 2 else -3
    assert ring.broadcast(comm, vector) is vector
    same(vector, wanted, f"broadcast {np.dtype(dtype)}")
    assert bits(wanted)[1] != bits(wanted)[0] and int(bits(wanted)[3]) == payload, "nothing special was sent"
    whole = data(0, 5 * comm.size, "int64")
    same(ring.broadcast(comm, xp.array(data(comm.rank, 5 * comm.size, "int64"))), whole, "broadcast int64")


def order_matters() -> None:
    """Without this, a ring that runs the wrong way round could pass at N >= 4."""
    parts = [data(member, 64 * N, "float32") for member in range(N)]
    right = summed(parts)
    for name, wrong in (("the other way", summed(parts, -1)), ("in rank order", sum(parts[1:], parts[0]))):
        assert N < 4 or (bits(right) != bits(wrong)).any(), f"the data cannot tell the sum from one {name}"
    chunks = right.reshape(N, -1)
    assert all(not np.array_equal(chunks[a], chunks[b]) for a in range(N) for b in range(a)), "chunks are alike"


def check_exchange(per_message: int) -> None:
    """One message to the right; and the buffer is free for something else as soon as the call returns."""
    for late in (False, True):
        send = xp.full(per_message, world.rank + 1, np.uint8)
        recv = xp.zeros(per_message, np.uint8)
        if late and world.rank % 2:
            time.sleep(0.05)  # the neighbours' messages wait meanwhile
        world.exchange(send, recv)
        send[:] = 255
        assert (recv == world.left + 1).all(), f"exchange of {per_message} bytes, late={late}: {xp.unique(recv)}"
    square = xp.arange(12, dtype="float32").reshape(3, 4) + world.rank
    recv = xp.zeros((2, 6), "float32")
    world.exchange(square, recv)
    assert (recv.reshape(-1) == xp.arange(12) + world.left).all(), "exchange of an array with two axes"


def check_refusals() -> None:
    good = xp.zeros((4, 4 * N), "float32")
    for array in (good.T, xp.asfortranarray(good), good[:, ::2]):
        for send, recv in ((array, xp.zeros(array.size, "float32")), (xp.zeros(array.size, "float32"), array)):
            words = "exchange", "not contiguous: pass numpy.ascontiguousarray"
            refused(partial(world.exchange, send, recv), ValueError, *words)
    if ON_HOST:
        buffer, locked = np.zeros(24, np.uint8), np.zeros(4 * N, "float32")
        locked.flags.writeable = False
        refused(lambda: world.exchange(buffer[:16], buffer[8:]), ValueError, "overlaps the one to send")
        refused(lambda: world.exchange(buffer, locked), ValueError, "read-only")
        refused(lambda: ring.all_gather(world, locked), ValueError, "read-only")
        refused(lambda: ring.all_gather(world, np.array([None] * 2 * N)), TypeError)
    for function in (ring.reduce_scatter, ring.all_gather, ring.all_reduce, ring.broadcast):
        refused(partial(function, world, xp.zeros(N * 3 + 1)), ValueError, f"multiple of {N}", f"({N * 3 + 1},)")
        refused(partial(function, world, good), ValueError, f"ring of {N} ranks", f"(4, {4 * N})")
        refused(partial(function, world, xp.zeros(8 * N)[::2]), ValueError, "contiguous")


def refused(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    before = dict(world.traffic)
    expect.raises(error, call, *words)
    assert dict(world.traffic) == before, f"bytes were sent before the refusal: {words}"


@contextmanager
def costs(comm: mz.Communicator, what: str, **wanted: int) -> Iterator[None]:
    comm.traffic.clear()
    yield
    wanted = {operation: count for operation, count in wanted.items() if count}
    assert dict(comm.traffic) == wanted, f"{what}, N={comm.size}: sent {dict(comm.traffic)} bytes instead of {wanted}"


def check_traffic() -> None:
    for dtype, width in (("float32", 4), (bfloat16, 2), ("float64", 8)):
        v = xp.ones(6 * N, dtype)
        part = 6 * width * (N - 1)  # V(N-1)/N
        with costs(world, "reduce_scatter", reduce_scatter=part):
            ring.reduce_scatter(world, v)
        with costs(world, "all_gather", all_gather=part):
            ring.all_gather(world, v)
        with costs(world, "all_reduce", all_reduce=2 * part):
            ring.all_reduce(world, v)
        with costs(world, "broadcast", broadcast=2 * part):
            ring.broadcast(world, v)
        with costs(world, "control", control=2 * part):
            with world.label("control"):
                ring.all_reduce(world, v)
        with costs(world, "all together", reduce_scatter=part, all_gather=2 * part, exchange=5):
            ring.all_gather(world, v)
            world.exchange(xp.zeros(5, np.uint8), xp.zeros(5, np.uint8))
            with world.label(unit=3):
                ring.reduce_scatter(world, v)
            ring.all_gather(world, v)
    with costs(world, "split", control=N - 1):
        part_of_world = world.split(0)
    with costs(part_of_world, "a communicator of its own", all_gather=8 * (N - 1)):
        with costs(world, "not this one"):
            ring.all_gather(part_of_world, xp.ones(N))


def check_memory() -> None:
    """After the first call nothing is allocated: neither per message nor per call, whatever the size."""
    for dtype, per_chunk in (("float32", 1 << 18), (bfloat16, 1 << 18)):
        vector = np.ones(per_chunk * N, dtype)
        for function in (ring.reduce_scatter, ring.all_gather, ring.all_reduce, ring.broadcast):
            function(world, vector)
            tracemalloc.start()
            for _ in range(2):
                function(world, vector)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 32 << 10, f"{function.__name__} of {vector.nbytes} bytes, {dtype}: allocates {peak} bytes"
    assert world._scratch.nbytes <= max(4 << 18, MIB16), "the scratch is larger than one chunk"


def check_pieces() -> None:
    """What MPI cannot count goes in pieces (tested with a lower limit); ranks of other sizes are still noticed."""
    world._transport.largest = 100
    for size in (0, 1, 99, 100, 101, 200, 1_001):
        send, recv = np.full(size, world.rank, np.uint8), np.full(size, 99, np.uint8)
        world.traffic.clear()
        world.exchange(send, recv)
        assert world.traffic == {"exchange": size}, f"{size} bytes in pieces: {world.traffic}"
        assert (recv == world.left).all(), f"{size} bytes in pieces of 100"
    check_sums(world, 33, "float32", "in pieces")
    if N > 1:
        broken = world.split(0)
        size = 250 if world.rank == 1 else 180
        try:
            for _ in range(N):  # as many as it takes for the news to come round
                broken.exchange(np.zeros(size, np.uint8), np.zeros(size, np.uint8))
        except mz.CollectiveError as error:
            assert "in exchange (uint8)" in str(error), error
        else:
            raise AssertionError(f"rank {world.rank} did not notice that sizes differ")
    del world._transport.largest


def check_splits() -> None:
    """Parts of the world add up their own, at the same time, each with its own traffic."""
    half = world.split(int(world.rank < N // 2))
    parity = world.split(world.rank % 2)
    backwards = world.split(0, key=-world.rank)
    quarter = half.split(half.rank % 2)
    alone = world.split(world.rank)
    assert backwards.rank == N - 1 - world.rank and alone.size == 1 and parity.rank == world.rank // 2
    assert half.rank == (world.rank if world.rank < N // 2 else world.rank - N // 2)
    for part in (half, parity, backwards, quarter, alone):
        check_sums(part, 33, "float32", "split")
        check_broadcast(part, "float32")
    mine = xp.array([float(world.rank)] * parity.size)
    total = ring.all_reduce(parity, mine)
    assert (total == sum(range(world.rank % 2, N, 2))).all(), f"odd and even got mixed up: {total}"
    turned = ring.all_gather(backwards, xp.full(N, world.rank, "int32"))
    assert turned.tolist() == list(range(N))[::-1], f"a reversed ring is {turned}"
    for _ in range(world.rank % 3):  # parts need not do the same number of things
        ring.all_reduce(alone, xp.ones(3))
    if half.size > 1 and world.rank < N // 2:
        ring.all_reduce(half, xp.ones(half.size))


large = "large" in sys.argv
order_matters()
for dtype in ("float32", "float64", bfloat16, "int32", "int64"):
    for per_chunk in (0, 1, 33):
        check_sums(world, per_chunk, dtype)
for dtype in ("uint8", "int8", "uint16", "bool", "complex128", "float16", ml_dtypes.float8_e4m3fn):
    gathered = np.zeros(3 * N, dtype)
    gathered[3 * world.rank : 3 * world.rank + 3] = [1, 0, 1]
    ring.all_gather(world, gathered)
    assert gathered.astype("complex64").tolist() == [1, 0, 1] * N, f"all_gather of {dtype}: {gathered}"
for size in (KIB64, *([MIB16 // N] if large else [])):
    check_sums(world, size // 4, "float32", "large")
    check_gather(world, size // 8, "int64", "large")
for dtype in ("float32", "float64", bfloat16):
    check_broadcast(world, dtype)
for size in (0, 4, KIB64, *([MIB16] if large else [])):
    check_exchange(size)
if N > 1:
    check_refusals()
check_traffic()
check_pieces()
check_splits()
if ON_HOST:
    check_memory()
sys.stdout.write(f"rank {world.rank} of {N}: done\n")
