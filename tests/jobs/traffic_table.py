"""The table of bytes that one rank sends per step, written down once more and apart from the framework.

In units of Ψ(N-1)/N, where Ψ are the bytes of all trained units, padding included, and k the backward calls per step:

              every backward reduces                      k - 1 of the k inside no_sync
    DP        all_reduce 2k                               2
    ZeRO-1    all_reduce 2k     all_gather 1              2 + 1
    ZeRO-2    reduce_scatter k  all_gather 1              1 + 1
    ZeRO-3    reduce_scatter k  all_gather 2k             1 + 2k

A frozen unit is gathered under ZeRO-3, and nothing else: 2k, or k where backward never comes to it. Control is
8(N-1) bytes per number told: five per step, and one per trained parameter when the norm is taken.
"""

from collections.abc import Sequence

FACTS = 5  # examples, calls with and without `examples`, rows, "is something not finite?"
Bytes = dict[str, int]  # operation -> bytes sent by one rank


def padded(elements: int, n: int) -> int:
    """`elements` rounded up to a multiple of n."""
    return -(-elements // n) * n


def wire(units: Sequence[int], itemsize: int, n: int) -> int:
    """Ψ(N-1)/N for units of so many elements: what one rank sends for one reduce-scatter, or all-gather, of all."""
    return sum(padded(unit, n) // n * (n - 1) * itemsize for unit in units)


def per_step(stage: str, trained: int, n: int, k: int, no_sync: bool, frozen: int = 0) -> Bytes:
    """One step's traffic without control. `trained`: `wire` bytes of trained units; `frozen`: all gathers of others."""
    reductions = 1 if no_sync else k
    table = {
        "DataParallel": {"all_reduce": 2 * reductions * trained},
        "Zero1": {"all_reduce": 2 * reductions * trained, "all_gather": trained},
        "Zero2": {"reduce_scatter": reductions * trained, "all_gather": trained},
        "Zero3": {"reduce_scatter": reductions * trained, "all_gather": 2 * k * trained + frozen},
    }
    return table[stage]


def control(n: int, parameters: int, clipped: bool) -> int:
    """Bytes of control in a step of a model with so many trained parameters."""
    return 8 * (n - 1) * (FACTS + (parameters if clipped else 0))


def wrapping(everything: int, n: int) -> Bytes:
    """What making an engine sends: rank 0's values of all units, frozen ones too, and a checksum of the model."""
    return {"broadcast": 2 * everything, "control": 8 * (n - 1)}


def nonzero(traffic: Bytes) -> Bytes:
    return {operation: sent for operation, sent in traffic.items() if sent}
