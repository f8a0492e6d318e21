"""How do N-1 messages make a reduce-scatter, N-1 more an all-gather, and both an all-reduce?

A vector is cut in N equal chunks; chunk r is rank r's own. In each step every rank sends one chunk to the right
and receives one from the left. With N = 4, chunk by chunk, what rank r *sends* in each step:

    reduce-scatter   rank 0   rank 1   rank 2   rank 3      all-gather   rank 0   rank 1   rank 2   rank 3
       step 0          3        0        1        2           step 0       0        1        2        3
       step 1          2        3        0        1           step 1       3        0        1        2
       step 2          1        2        3        0           step 2       2        3        0        1

Follow chunk 0 on the left: rank 1 sends its own, rank 2 adds its own to it and sends that, then rank 3, and rank 0
adds last and keeps the sum. Chunk c is always added in the order c+1, c+2, ..., c, whoever asks and whatever stage:
that fixed order is half of why all stages have the same bits.

Cost per rank, for a vector of V bytes: V(N-1)/N sent for either half, 2V(N-1)/N for an all-reduce.
(Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".)
"""

from __future__ import annotations

import numpy as np

from . import backend
from .backend import Array, xp
from .comm import Communicator, number_of
from .optim import add

ADDED = (xp.ndarray, np.memmap) if backend.ON_HOST else (xp.ndarray,)  # a masked array, say, adds in its own way
MOVED = (*ADDED, np.ndarray, np.memmap)  # the facts that ranks exchange are the host's also where arrays live on a GPU


def chunks(vector: Array, n: int, kinds: tuple[type, ...] = MOVED) -> list[Array]:
    """The n equal chunks of a vector, as views. Raises ValueError where it is not contiguous or they are not equal."""
    if type(vector) not in kinds:
        kind = f"{type(vector).__module__.split('.')[0]}.{type(vector).__name__}"
        raise TypeError(f"a ring needs a {backend.name}.ndarray, not {kind}")
    if vector.ndim != 1 or vector.size % n:
        raise ValueError(
            f"a ring of {n} ranks needs a vector of a multiple of {n} elements, got shape {vector.shape}: pad it"
        )
    number_of(vector.dtype)  # which refuses what is not sent
    if not vector.flags.c_contiguous:
        raise ValueError("a ring needs a vector that is contiguous: pass numpy.ascontiguousarray(...) of it")
    length = vector.size // n
    return [vector[i * length : (i + 1) * length] for i in range(n)]


def reduce_scatter(comm: Communicator, vector: Array) -> Array:
    """Sum the vectors of all ranks; rank r gets chunk r of the sum.

    Collective. `vector` (N * length,) is contiguous, of the same size and dtype on every rank. In place: returns
    this rank's chunk, a view into `vector`; the other chunks are left with partial sums.
    """
    chunk = chunks(vector, comm.size, ADDED)
    arriving = comm.scratch(chunk[0].size, vector.dtype)
    with comm.label("reduce_scatter"):
        for step in range(comm.size - 1):
            mine = chunk[(comm.rank - 2 - step) % comm.size]
            comm.exchange(chunk[(comm.rank - 1 - step) % comm.size], arriving)
            add(mine, arriving)
    return chunk[comm.rank]


def all_gather(comm: Communicator, vector: Array) -> Array:
    """Fill `vector` from the chunks that the ranks own: chunk r is taken from rank r.

    Collective. `vector` (N * length,) is contiguous, of the same size and dtype on every rank. In place; returns it.
    """
    chunk = chunks(vector, comm.size)
    with comm.label("all_gather"):
        for step in range(comm.size - 1):
            comm.exchange(chunk[(comm.rank - step) % comm.size], chunk[(comm.rank - 1 - step) % comm.size])
    return vector


def all_reduce(comm: Communicator, vector: Array) -> Array:
    """Sum the vectors of all ranks; every rank gets the whole sum. Collective, in place; returns `vector`."""
    with comm.label("all_reduce"):
        reduce_scatter(comm, vector)
        return all_gather(comm, vector)


def broadcast(comm: Communicator, vector: Array) -> Array:
    """Give every rank the bits of rank 0's vector. Collective, in place; returns `vector`.

    An all-reduce in which all others contribute zero. Adding integers, since those have no -0.0 and no rounding.
    """
    chunks(vector, comm.size, ADDED)  # which refuses what cannot go round, before it is overwritten
    if comm.rank > 0:
        bits(vector)[:] = 0
    with comm.label("broadcast"):
        all_reduce(comm, bits(vector))
    return vector


def bits(vector: Array) -> Array:
    """The same memory as unsigned integers (two for each complex128)."""
    return vector.view(np.dtype(f"uint{8 * min(vector.dtype.itemsize, 8)}"))
