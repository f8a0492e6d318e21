"""Two ranks train on the stand-in for CuPy, with one fault in minizero that a real GPU would make a mess of.

    MINIZERO_BACKEND=cupy PYTHONPATH=.:tests/strict mpirun -n 2 python tests/jobs/strict_faults.py "host array added"

Without a fault ("none") it prints what the last loss was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import cupyx
import numpy as np

import minizero as mz
from minizero import backend, engine, flat, functional, nn, optim, parameter, ring, transport
from minizero import functional as F
from minizero.backend import to_host, xp
from minizero.parameter import Parameter
from minizero.transport import Direct, Staged

comm = mz.Communicator()
Patch = tuple[Any, str, Any]


def fill_from_the_host(self: Parameter, flat: Any, seed: int) -> None:
    flat[:] = self.init(np.random.default_rng(seed), self.size)


def scatter_by_assignment(rows: int, ids: Any, source: Any) -> Any:
    total = xp.zeros((rows, *source.shape[1:]), source.dtype)
    total[ids] = source  # which of them, if an id comes twice?
    return total


def read_the_loss(x: Any, y: Any) -> Any:
    loss = cross_entropy(x, y)
    print(f"loss {loss.item():.3f}")
    return loss


def add_with_host(target: Any, source: Any) -> None:
    target += to_host(source)


def without_waiting(self: Staged, message: Any) -> Any:
    if isinstance(message, np.ndarray) or not message.size:
        return outgoing(self, message)
    host = self.pinned("out", message.size)
    message.get(out=host, blocking=False)
    return host


def another_device(number: int) -> None:
    """Chosen after something was allocated."""
    global early
    early = xp.ones(4, np.float32)
    xp.cuda.Device((backend.xp.cuda.Device().id + 1) % 2).use()
    early += 1


early: Any = None
cross_entropy, outgoing = F.cross_entropy, Staged.outgoing
FAULTS: dict[str, list[Patch]] = {
    "none": [],
    # implicit conversion
    "implicit conversion": [(engine, "to_host", np.asarray)],
    # arrays of the host among those of the device
    "host array assigned": [(Parameter, "fill", fill_from_the_host)],
    "host array added": [(ring, "add", add_with_host), (flat, "add", add_with_host)],
    # names and keywords that CuPy lacks
    "a name": [(functional, "rows_of", lambda a: xp.unstack(a.reshape(1, -1, a.shape[-1]))[0])],
    "a keyword": [(optim, "all_finite", None), (engine, "all_finite", lambda *vectors: all(
        bool(xp.isfinite(vector.sum(where=vector == vector))) for vector in vectors))],
    # MPI and work that is still to be done
    "unsynchronised": [(Direct, "settle", lambda self: None)],
    "unsynchronised receiving": [(Direct, "incoming", lambda self, message: (message.fill(0), message)[1])],
    "unsynchronised staging": [(Staged, "outgoing", without_waiting)],
    # GPU memory in the hands of an MPI that is not CUDA-aware
    "not CUDA-aware": [],
    # and more
    "an empty slice": [(functional, "largest", lambda array, axis, keepdims: array.max(axis=axis, keepdims=keepdims))],
    "an element twice": [(functional, "scatter_add", scatter_by_assignment)],
    "a hidden wait": [(F, "cross_entropy", read_the_loss)],
    "device too late": [(parameter, "dtype_of", None), (backend, "use_device", another_device)],
}  # fmt: skip


def train(rows: int) -> float:
    model = nn.Sequential(nn.Embedding(5, 4), F.relu, nn.Linear(4, 3, dtype="bfloat16"))
    wrapped = mz.Zero2(model, mz.Adam(), comm)
    tokens, targets = np.array([1, 1, 4, 0])[:rows], np.array([0, 1, 2, 2])[:rows]
    with cupyx.allow_synchronize(False):
        loss = F.cross_entropy(wrapped(xp.asarray(tokens)), targets)
        with mock.patch.object(Staged, "outgoing", allowed(Staged.outgoing)):
            wrapped.backward(loss, examples=rows)
    wrapped.step()
    assert wrapped.gather_parameters()
    return loss.item()


def allowed(method: Callable[..., Any]) -> Callable[..., Any]:
    """On its way through pinned memory, every message has to wait."""

    def run(*args: Any) -> Any:
        with cupyx.allow_synchronize(True):
            return method(*args)

    return run


if __name__ == "__main__":
    fault = sys.argv[1]
    assert comm._transport.__class__ is (Staged if "stag" in fault or not transport.cuda_aware()[0] else Direct)
    for owner, name, replacement in FAULTS[fault]:
        if replacement is not None:
            setattr(owner, name, replacement)
    if fault == "device too late":
        backend.use_device(0)
    print(f"loss {train(4 if comm.rank or fault != 'an empty slice' else 0):.4f}")
