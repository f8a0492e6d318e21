"""The cases about messages: each function is a claim, and says so when it holds on every rank.

Values are small whole numbers, so that sums are exact in every dtype and written down here, not computed by a ring.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import expect
import ml_dtypes
import numpy as np
from mpi4py import MPI

import minizero as mz
from minizero import comm as messages
from minizero import nn, ring
from minizero.backend import ON_HOST, to_host, xp

N, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
world: mz.Communicator  # which the first claim makes
KIB64, MIB16 = 1 << 16, 1 << 24
Array = np.ndarray[Any, Any]
Collective = Callable[[mz.Communicator, Any], Any]
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": ring.all_reduce,
    "reduce_scatter": ring.reduce_scatter,
    "all_gather": ring.all_gather,
    "broadcast": ring.broadcast,
}


def given(member: int, count: int, dtype: Any = "float32") -> Array:
    """What rank `member` brings: small whole numbers, others on each rank and, within 31 elements, in each place."""
    return np.resize((np.arange(31) + 2 * member).astype(dtype), count)


def total(count: int, dtype: Any = "float32") -> Array:
    """The sum of what all ranks bring."""
    return np.resize((N * np.arange(31) + N * (N - 1)).astype(dtype), count)


def own(vector: Any, member: int = rank) -> Any:
    """The chunk of a vector that rank `member` owns."""
    return vector[member * len(vector) // N : (member + 1) * len(vector) // N]


def gathered(count: int, dtype: Any = "float32") -> Array:
    """Chunk by chunk, what the chunk's owner brings."""
    return np.concatenate([own(given(member, count, dtype), member) for member in range(N)])


def wanted(name: str, count: int, dtype: Any = "float32") -> Array:
    """What the collective `name` returns on this rank."""
    if name == "all_gather":
        return gathered(count, dtype)
    if name == "broadcast":
        return given(0, count, dtype)
    return own(total(count, dtype)) if name == "reduce_scatter" else total(count, dtype)


def same(got: Any, right: Array, what: str) -> None:
    got = to_host(got)
    assert got.dtype == right.dtype and got.shape == right.shape, f"{what}: {got.dtype}{got.shape}"
    unsigned = f"u{right.dtype.itemsize}" if right.dtype.itemsize < 16 else "u8"
    wrong = np.flatnonzero(got.view(unsigned) != right.view(unsigned))
    assert not wrong.size, f"{what}: rank {rank} of {N}: {wrong.size} of {got.size} elements are wrong, from {wrong[0]}"


def refused(what: str, call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """`call` raises on this rank, with these words, and no byte was sent."""
    before = dict(world.traffic)
    expect.raises(kind, call, *words, what=what)
    assert dict(world.traffic) == before, f"{what}: bytes were sent before it was refused"


def all_raise(what: str, do: Callable[[mz.Communicator], Any], *words: str) -> None:
    comm = world.split(0)
    try:
        do(comm)
    except mz.CollectiveError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{what}, rank {rank}: {missing} not in: {error}"
    else:
        raise AssertionError(f"{what}: no error on rank {rank}")


# Before there is a communicator of ours, and so before the others.
def receives_of_the_users_from_anyone_get_no_message_of_ours_while_communicators_are_made() -> None:
    if rank == 0:
        found = sorted(MPI.COMM_WORLD.recv() for _ in range(N - 1))  # from any rank, with any tag
        assert found == [("data of", member) for member in range(1, N)], found
    else:
        time.sleep(0.1 * (rank - 1))  # the first of them waits for rank 0 in its Communicator() meanwhile
        MPI.COMM_WORLD.send(("data of", rank), 0)
    global world
    world = mz.Communicator()


# Case 25


def messages_of_0_bytes_4_bytes_64_kib_and_16_mib_arrive() -> None:
    """And of sizes beside those at which an MPI changes its way of sending."""
    for size in (0, 4, KIB64 - 1, KIB64, KIB64 + 1, (1 << 20) + 1, MIB16):
        send, recv = xp.full(size, rank + 1, np.uint8), xp.zeros(size, np.uint8)
        world.traffic.clear()
        world.exchange(send, recv)
        assert (recv == world.left + 1).all(), f"{size} bytes: rank {rank} of {N} has {xp.unique(recv)}"
        assert world.traffic["exchange"] == size, f"{size} bytes: {world.traffic}"


def collectives_whose_messages_have_0_bytes_4_bytes_64_kib_and_16_mib_are_right() -> None:
    for size in (0, 4, KIB64, MIB16):
        count = N * size // 4  # float32 elements: a message is one of N chunks
        for name, collective in COLLECTIVES.items():
            if size < MIB16 or name == "all_reduce":  # which is two of the others
                got = collective(world, xp.asarray(given(rank, count)))
                same(got, wanted(name, count), f"{name}, messages of {size} bytes")


class Counting:
    """An mpi4py communicator that counts what is sent through it."""

    def __init__(self, mpi: MPI.Comm) -> None:
        self.mpi, self.sizes = mpi, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mpi, name)

    def Isend(self, buffer: Any, *where: Any) -> MPI.Request:  # noqa: N802  (mpi4py's name)
        self.sizes.append(buffer[0].size)
        return self.mpi.Isend(buffer, *where)


def what_mpi_cannot_count_goes_in_pieces_that_it_can() -> None:
    """Tested with a lower limit than 2^31. Each piece keeps to it, and ranks of other sizes are noticed as before."""
    comm = world.split(0)
    assert comm._transport.largest < 2**31
    comm._transport.largest = 1000
    counting: Any = Counting(comm.mpi)
    comm.mpi = counting
    for size in (0, 1, 999, 1000, 1001, 2000, 2500):
        counting.sizes.clear()
        send, recv = np.full(size, rank + 1, np.uint8), np.zeros(size, np.uint8)
        comm.exchange(send, recv)
        assert (recv == comm.left + 1).all(), f"{size} bytes in pieces"
        pieces = [1000] * (size // 1000) + [size % 1000]  # the last is shorter: where the message ends is always said
        assert counting.sizes == pieces, f"{size} bytes went in pieces of {counting.sizes}"
    for name, collective in COLLECTIVES.items():
        got = collective(comm, xp.asarray(given(rank, N * 700)))
        same(got, wanted(name, N * 700), f"{name} in pieces")
    refused("unequal", lambda: comm.exchange(np.zeros(9, np.uint8), np.zeros(1000, np.uint8)), ValueError, "the same")
    for odd_one, others in ((2000, 1000), (1000, 2000), (2500, 2400), (0, 1001)):
        size = odd_one if rank == 1 else others

        def differ(comm: mz.Communicator, size: int = size) -> None:
            for _ in range(N):  # as many as it takes for the news to come round
                comm.exchange(np.zeros(size, np.uint8), np.zeros(size, np.uint8))

        all_raise(f"{odd_one} and {others} bytes in pieces", differ, "in exchange (uint8)", "differ in size")


# Case 26


def arrays_that_are_not_contiguous_are_refused_by_every_collective() -> None:
    square = xp.asarray(given(rank, 16 * N * N).reshape(4 * N, 4 * N))
    long = xp.asarray(given(rank, 8 * N))
    shapes = {
        "transposed": square.T, "Fortran": xp.asfortranarray(square), "columns": square[:, :N],
        "every second": long[::2], "reversed": long[::-1], "repeated": xp.broadcast_to(long[:1], (4 * N,)),
    }  # fmt: skip
    for shape, array in shapes.items():
        before = array.copy()
        good = xp.zeros(array.shape, array.dtype)
        for send, recv in ((array, good), (good, array)):
            words: tuple[str, ...] = "exchange", "not contiguous: pass numpy.ascontiguousarray", str(array.shape)
            refused(f"exchange, {shape}", partial(world.exchange, send, recv), ValueError, *words)
        for name, collective in COLLECTIVES.items():
            words = ("contiguous", "ascontiguousarray") if array.ndim == 1 else ("needs a vector", str(array.shape))
            refused(f"{name}, {shape}", partial(collective, world, array), ValueError, *words)
        assert bool((array == before).all()), f"{shape}: changed by what was refused"
    for name, collective in COLLECTIVES.items():
        same(collective(world, xp.asarray(given(rank, 8 * N))), wanted(name, 8 * N), f"{name} after refusals")


def contiguous_views_of_larger_arrays_are_right_and_nothing_beside_them_changes() -> None:
    for name, collective in COLLECTIVES.items():
        table = xp.full((3, 8 * N), -1, "float32")
        table[1] = xp.asarray(given(rank, 8 * N))
        same(collective(world, table[1]), wanted(name, 8 * N), f"{name} of a row")
        assert bool((table[0] == -1).all() and (table[2] == -1).all()), f"{name} of a row has changed another row"


def what_only_resembles_an_array_is_refused_by_name() -> None:
    """A masked array would not add what it masks: silently wrong."""
    vector = given(rank, 2 * N)
    masked = np.ma.masked_array(given(rank, 2 * N, "uint8"), mask=[True, False] * N)
    lookalikes = {"MaskedArray": masked, "matrix": np.matrix(vector), "list": vector.tolist(),
                  "Tensor": mz.Tensor(vector), "float64": np.float64(3)}  # fmt: skip
    for kind, lookalike in lookalikes.items():
        for name, collective in COLLECTIVES.items():
            refused(
                f"{name} of a {kind}", partial(collective, world, lookalike), TypeError, ".ndarray, not ", f".{kind}"
            )


def odd_but_honest_memory_is_right() -> None:
    """Unaligned, and mapped from a file. (From there, nothing is added to what lives on a GPU.)"""
    with tempfile.TemporaryDirectory() as folder:
        mapped = np.memmap(Path(folder) / "vector", np.float32, "w+", shape=4 * N)
        unaligned = np.zeros(16 * N + 1, np.uint8)[1:].view(np.float32)
        assert not unaligned.flags.aligned
        for what, vector in (("memmap", mapped), ("unaligned", unaligned)):
            for name, collective in COLLECTIVES.items() if ON_HOST else [("all_gather", ring.all_gather)]:
                vector[:] = given(rank, 4 * N)
                same(np.array(collective(world, vector)), wanted(name, 4 * N), f"{name}, {what}")


# Case 27


def a_result_is_the_vector_that_was_given_or_this_ranks_chunk_of_it() -> None:
    for name, collective in COLLECTIVES.items():
        vector = xp.array(given(rank, 6 * N))
        result = collective(world, vector)
        if name == "reduce_scatter":
            assert result.base is vector and result.size == 6, f"{name} returns another array than a chunk"
            result[:] = -7
            assert (own(vector) == -7).all() and (vector == -7).sum() == 6, f"{name}: not this rank's own chunk"
        else:
            assert result is vector, f"{name} returns another array than it was given"


def no_later_call_changes_an_earlier_result() -> None:
    """Scratch that is used again must never be what was returned."""
    results = []
    for round_ in range(3):
        for name, collective in COLLECTIVES.items():
            vector = xp.asarray(given(rank, 512 * N))
            results.append((f"{name}, round {round_}", collective(world, vector), wanted(name, 512 * N)))
    for what, result, right in results:
        same(result, right, f"{what}, looked at later")


def a_buffer_may_be_used_again_as_soon_as_a_call_returns() -> None:
    """Also while the neighbour, who is late, has not yet looked at what was sent."""
    for size in (4, KIB64, 1 << 20):
        send = xp.zeros(size, np.uint8)
        for turn in range(6):
            send[:] = 10 * turn + rank
            recv = xp.zeros(size, np.uint8)
            if turn % N == rank:
                time.sleep(0.005)
            world.exchange(send, recv)
            send[:] = 255
            assert (recv == 10 * turn + world.left).all(), f"{size} bytes, turn {turn}: {xp.unique(recv)}"


def sending_what_is_received_into_is_refused() -> None:
    buffer = xp.zeros(24, np.uint8)
    for send, recv in ((buffer, buffer), (buffer[:16], buffer[8:]), (buffer[8:], buffer[:16]), (buffer, buffer[:4])):
        refused("overlap", partial(world.exchange, send, recv), ValueError, "overlaps the one to send")
    buffer, locked = np.zeros(24, np.uint8), np.zeros(24, np.uint8)
    locked.flags.writeable = False
    refused("read-only", partial(world.exchange, buffer, locked), ValueError, "read-only")
    world.exchange(locked, buffer)  # it may well be sent


def what_an_engine_gives_away_is_a_copy() -> None:
    """A user who writes to it changes nothing here, and later steps change nothing there."""
    x = np.ones((2, 4), np.float32)
    for stage in mz.STAGES:
        engine = stage(nn.MLP([4, 3, 2], seed=1), mz.Adam(0.1), world)
        for _ in range(2):
            engine.backward(engine(x).sum())
            engine.step()
        weights, state = engine.gather_parameters(), engine.gather_optimizer_state()
        kept = {name: array.copy() for name, array in weights.items()}
        for array in (*weights.values(), *(moment for each in state.values() for moment in each.values())):
            array[...] = -1
        again = engine.gather_parameters()
        for name, array in kept.items():
            same(again[name], array, f"{stage.__name__}: {name} was changed through a gathered copy")
        moments = [moment for each in engine.gather_optimizer_state().values() for moment in each.values()]
        assert moments and not any((moment == -1).any() for moment in moments), f"{stage.__name__}: moments changed"
        engine.backward(engine(x).sum())
        engine.step()
        for name, array in kept.items():
            same(again[name], array, f"{stage.__name__}: a gathered {name} was changed by a step")


# Case 28

NUMBERS = [np.dtype(name) for name in messages.DTYPES]
ADDED = [dtype for dtype in NUMBERS if ON_HOST or not dtype.name.startswith("float8")]  # which no CuPy array has


def every_supported_dtype_goes_round_with_all_its_bits() -> None:
    assert len(NUMBERS) == 17 and np.dtype(ml_dtypes.bfloat16) in NUMBERS
    for dtype in NUMBERS:
        drawn = np.random.default_rng(dtype.num).integers(0, 256, (N, 24 * dtype.itemsize)).astype(np.uint8)
        if dtype == np.bool_:
            drawn %= 2
        wanted = drawn.reshape(-1).view(dtype)  # NaNs with payloads, infinities and denormals among them
        vector = np.zeros_like(wanted)
        own(vector)[:] = own(wanted)
        same(ring.all_gather(world, vector), wanted, f"all_gather of {dtype}")
        if dtype in ADDED:
            vector = wanted.copy() if rank == 0 else np.zeros_like(wanted)
            same(ring.broadcast(world, xp.asarray(vector)), wanted, f"broadcast of {dtype}")
        recv = np.zeros(24, dtype)
        world.exchange(own(wanted), recv)
        same(recv, own(wanted, world.left), f"exchange of {dtype}")


def every_supported_dtype_is_added_as_numpy_adds_it() -> None:
    for dtype in ADDED:
        if dtype.name.startswith("float8"):  # which has 3 or 2 bits for the digits
            vector, right = np.full(2 * N, 1, dtype), np.full(2 * N, N, dtype)
        elif dtype == np.bool_:
            vector, right = np.arange(2 * N) // 2 == rank, np.ones(2 * N, bool)  # one rank says yes to each
        else:
            vector, right = given(rank, 31 * N, dtype), total(31 * N, dtype)
        same(ring.all_reduce(world, xp.asarray(vector)), right, f"all_reduce of {dtype}")


def unsupported_dtypes_are_refused_by_name() -> None:
    for dtype in ("object", "<U4", "|S4", "datetime64[s]", "timedelta64[s]", "float128", ">f4", ">i8", "float4_e2m1fn"):
        if dtype == "float128" and not hasattr(np, "float128"):
            continue  # where long double is double
        array = np.zeros(2 * N, dtype)
        words = f"of dtype {array.dtype} are not sent", "float32", "bfloat16", "int64"
        for name, collective in COLLECTIVES.items() if ON_HOST else [("all_gather", ring.all_gather)]:
            refused(f"{name} of {dtype}", partial(collective, world, array), TypeError, *words)
        refused(f"exchange of {dtype}", partial(world.exchange, array, array.copy()), TypeError, *words)
    table = np.zeros(2 * N, [("a", "i4"), ("b", "f4")])
    refused("structured", partial(ring.all_gather, world, table), TypeError, "('a', '<i4')")


def dtypes_of_the_same_width_are_told_apart() -> None:
    """One rank with another dtype: its bytes would fit."""
    pairs = [("bool", "int8"), ("int8", "uint8"), ("float8_e4m3fn", "float8_e5m2"), ("float16", "bfloat16"),
             ("int16", "uint16"), ("int32", "float32"), ("complex64", "float64"), ("int64", "uint64")]  # fmt: skip
    for usual, odd in pairs:
        array = np.zeros(2 * N, odd if rank == N - 1 else usual)
        what = f"{usual} and {odd}"
        all_raise(what, partial(lambda array, comm: ring.all_gather(comm, array), array), f"({usual})", f"({odd})")


# Relatives


def threads_on_communicators_of_their_own_do_not_disturb_each_other() -> None:
    """Nothing that one of them uses while it adds may be the other's: bfloat16 is added in blocks of scratch."""
    count, dtype = 20_000 * N, np.dtype(ml_dtypes.bfloat16)
    wrong: list[str] = []

    def work(comm: mz.Communicator, value: int) -> None:
        for turn in range(12):
            result = to_host(ring.all_reduce(comm, xp.full(count, value, dtype)))
            if (result != value * N).any():
                wrong.append(f"thread {value}, turn {turn}: {np.unique(result.astype(np.float32))}")

    threads = [threading.Thread(target=work, args=(world.split(0), value)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"rank {rank}: {wrong}"


def what_tells_ranks_apart_costs_no_message_and_no_byte() -> None:
    """N - 1 messages for either half of an all-reduce, of V/N bytes each, and nothing besides."""
    comm = world.split(0)
    counting: Any = Counting(comm.mpi)
    comm.mpi = counting
    for name, collective in COLLECTIVES.items():
        counting.sizes.clear()
        with comm.label(unit=2, names=["one", "two", "three"]):
            collective(comm, xp.asarray(given(rank, 10 * N)))
        halves = 1 if name in ("reduce_scatter", "all_gather") else 2
        assert counting.sizes == [40] * halves * (N - 1), f"{name}: messages of {counting.sizes} bytes"


def receives_of_the_users_from_anyone_get_no_message_of_ours_when_ranks_end() -> None:
    """Rank 0 collects results while those that have sent theirs have ended their program already."""
    if rank:
        time.sleep(0.1 * (rank - 1))
        MPI.COMM_WORLD.send(("result of", rank), 0)
        sys.exit()
    time.sleep(0.1)
    found = sorted(MPI.COMM_WORLD.recv() for _ in range(N - 1))
    assert found == [("result of", member) for member in range(1, N)], found


CLAIMS = [claim for name, claim in list(globals().items()) if isinstance(claim, FunctionType) and name.count("_") > 3]
if __name__ == "__main__":
    for claim in CLAIMS:
        try:
            claim()
        except Exception as error:
            raise AssertionError(f"{claim.__name__} does not hold on rank {rank} of {N}: {error!r}") from error
        if rank == 0:
            sys.stdout.write(f"ok {claim.__name__}\n")
