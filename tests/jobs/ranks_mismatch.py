"""Every way in which ranks can do different things at the same time: all of them must raise, soon, and stay away.

Each scenario has a communicator of its own, as the error breaks it. `odd` is the rank that does something else.
"""

import re
import time
from collections.abc import Callable

import minizero as mz
from minizero import ring
from minizero.backend import Array, xp

world = mz.Communicator()
N = world.size
NAMES = ["first", "second", "third"]
MIB16 = 1 << 22  # float32 elements

Do = Callable[[mz.Communicator], object]


def vector(count: int, dtype: str = "float32") -> Array:
    return xp.full(N * count, world.rank, dtype)


def reduce(count: int, dtype: str = "float32", unit: int = -1) -> Do:
    def do(comm: mz.Communicator) -> object:
        with comm.label(unit=unit, names=NAMES):
            return ring.all_reduce(comm, vector(count, dtype))

    return do


def gather(count: int) -> Do:
    return lambda comm: ring.all_gather(comm, vector(count))


def scatter(count: int) -> Do:
    return lambda comm: ring.reduce_scatter(comm, vector(count))


def calls(*units: int) -> Do:
    def do(comm: mz.Communicator) -> None:
        for unit in units:
            reduce(64, unit=unit)(comm)

    return do


def late(do: Do) -> Do:
    def sleepy(comm: mz.Communicator) -> object:
        time.sleep(0.5)
        return do(comm)

    return sleepy


def fails(title: str, usual: Do, unusual: Do, odd: int, *words: str) -> None:
    """Every rank raises; the message names both sides: two neighbours, one of them `odd`, and all `words`."""
    comm = world.split(0)
    with comm.label(unit=0, names=NAMES):
        pass  # as an engine has done before: the names are known from now on
    where = f"{title}, N={N}, rank {odd} is the odd one, rank {comm.rank}"
    start = time.monotonic()
    try:
        (unusual if comm.rank == odd else usual)(comm)
    except mz.CollectiveError as error:
        text = str(error)
    else:
        raise AssertionError(f"{where}: no error")
    took = time.monotonic() - start
    assert took < 8, f"{where}: took {took:.1f} s"
    ranks = [int(rank) for rank in re.findall(r"rank (\d+)", text)]
    assert len(ranks) == 2 and (ranks[0] + 1) % N == ranks[1] and odd in ranks, f"{where}: who? {text}"
    for word in words:
        assert word in text, f"{where}: {word!r} is missing in: {text}"
    start = time.monotonic()
    for again in (usual, unusual, lambda comm: comm.split(0)):
        try:
            again(comm)
        except mz.CollectiveError as error:
            assert str(error) == text, f"{where}: later {error}, first {text}"
        else:
            raise AssertionError(f"{where}: no error at the second use")
    assert time.monotonic() - start < 1 + 2 * 0.5, f"{where}: the later errors took too long"


big = MIB16 if N <= 3 else MIB16 // N  # messages of 16 MiB where memory allows, but never small enough to be buffered
odds = [0, 1, N - 1] if N <= 3 else [N // 2]
for odd in odds:
    for size in (1, big):
        bytes_ = f"{4 * size} bytes"
        fails(f"operations, {bytes_}", reduce(size), gather(size), odd, "all_reduce", "all_gather", "float32")
        fails(f"units, {bytes_}", reduce(size, unit=0), reduce(size, unit=1), odd, "all_reduce of first", "of second")
        fails(
            f"larger, {bytes_}", reduce(size), reduce(2 * size), odd, f" {4 * size}", "all_reduce (float32)", "in size"
        )
        fails(
            f"smaller, {bytes_}", reduce(2 * size), reduce(size), odd, f" {4 * size}", "all_reduce (float32)", "in size"
        )
    fails("larger and another operation", reduce(1), gather(2), odd, "all_reduce", "all_gather")
    fails("halves", scatter(16_384), gather(16_384), odd, "reduce_scatter", "all_gather")
    fails("dtype", reduce(3), reduce(3, "int32"), odd, "(float32)", "(int32)")
    fails("dtype of half the bytes", reduce(1), reduce(2, "float16"), odd, "(float32)", "(float16)")
    fails("one call behind", calls(0, 1, 2), calls(0, 2), odd, "of second", "of third")
    fails("one call twice", calls(0, 1, 2), calls(0, 0, 1), odd, "of first", "of second")
    fails("no unit", reduce(5), reduce(5, unit=2), odd, "all_reduce of third", "in all_reduce (")
    fails("split", reduce(4), lambda comm: comm.split(0), odd, "all_reduce", "control")
fails("late", reduce(big, unit=0), late(reduce(big, unit=1)), odds[-1], "of first", "of second")
fails("early", late(reduce(big, unit=0)), reduce(big, unit=1), odds[-1], "of first", "of second")

comm = world.split(0)
try:
    reduce(3, unit=world.rank % 3)(comm)
except mz.CollectiveError as error:
    assert "every rank must call the same collectives in the same order" in str(error), str(error)
else:
    raise AssertionError("every rank in another unit than its neighbours: no error")
assert ring.all_reduce(world, xp.ones(N)).sum() == N * N, "the communicator that nobody broke still works"
