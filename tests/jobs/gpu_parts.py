"""The parts of tests/gpu_check.py, each a job of its own: `mpirun -n 5 python tests/jobs/gpu_parts.py bits`.

Rank 0 prints one JSON object: what was found. A check that fails raises, on whatever rank. All of them also run on
NumPy and on the stand-in for CuPy, where they prove that they themselves are right.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import minizero as mz
from minizero import backend, memory, nn, plan, ring, transport
from minizero import functional as F
from minizero.backend import to_host, xp
from minizero.comm import MPI

world = MPI.COMM_WORLD
Found = dict[str, Any]


def wait() -> None:
    """Until the device has done all it was told: for clocks."""
    if backend.name == "cupy":
        xp.cuda.get_current_stream().synchronize()


def machine() -> Found:
    """Versions, the device, and whether products of float32 are computed in float32."""
    found: Found = {
        "python": platform.python_version(), "numpy": np.__version__, "backend": backend.name,
        "mpi": MPI.Get_library_version().strip("\0").splitlines()[0],
        "cuda_aware": transport.cuda_aware(),
    }  # fmt: skip
    if backend.name == "cupy":
        facts = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
        found |= {
            "cupy": xp.__version__, "devices": xp.cuda.runtime.getDeviceCount(), "device": facts["name"].decode(),
            "memory": facts["totalGlobalMem"], "capability": str(xp.cuda.Device().compute_capability),
            "cuda": xp.cuda.runtime.runtimeGetVersion(), "driver": xp.cuda.runtime.driverGetVersion(),
        }  # fmt: skip
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((512, 512)) for _ in range(2))
    exact = a.astype("float32").astype("float64") @ b.astype("float32").astype("float64")
    product = to_host(xp.asarray(a.astype("float32")) @ xp.asarray(b.astype("float32")))
    batched = to_host(xp.asarray(a[None].astype("float32")) @ xp.asarray(b[None].astype("float32")))[0]
    found["float32 product is off by"] = off = max(float(abs(each - exact).max()) for each in (product, batched))
    assert off < 1e-3, f"a float32 product is off by {off:.1e}: TF32 (or less) where float32 was asked for"
    x = np.array([1 / 3, -0.0, 1e-40, 3.389e38, np.inf, 1.00390625, 1.01171875], "float32")
    there = to_host(xp.asarray(x).astype(backend.bfloat16)).view(np.uint16)
    here = x.astype(backend.bfloat16).view(np.uint16)
    wrong = int((there != here).sum()) - int(there[2] != here[2])  # a denormal may be flushed to zero
    assert not wrong, f"casts to bfloat16 round otherwise than ml_dtypes: {there} instead of {here}"
    return found


def operations(file: str) -> Found:
    """Forward and gradients of every operation: written to a file under NumPy, and compared with it elsewhere."""
    from test_functional import CASES, weights_like

    results: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        for dtype in ("float64", "float32"):
            inputs = [mz.Tensor(a.astype(dtype), requires_grad=True) for a in case.arrays]
            result = case.call(*inputs)
            results[f"{number} {dtype} {case}"] = to_host(result.data)
            if result.requires_grad:
                result.backward(weights_like(result))
            for i, x in enumerate(inputs):
                if x.grad is not None:
                    results[f"{number} {dtype} {case} gradient {i}"] = to_host(x.grad)
    if backend.name == "numpy" and not Path(file).exists():
        np.savez(file, **results)
        return {"written": len(results)}
    worst: dict[str, tuple[float, str]] = {"float64": (0.0, ""), "float32": (0.0, "")}
    with np.load(file) as known:
        assert sorted(known.files) == sorted(results), "other cases than NumPy's"
        for key, value in results.items():
            dtype, wanted = key.split()[1], known[key]
            assert value.shape == wanted.shape and value.dtype == wanted.dtype, f"{key}: {value.dtype}{value.shape}"
            scale = 1 + float(np.nanmax(abs(wanted[np.isfinite(wanted)]), initial=0))
            same = (value == wanted) | (np.isnan(value) & np.isnan(wanted))
            with np.errstate(invalid="ignore"):
                off = float(np.where(same, 0, abs(value - wanted)).max(initial=0)) / scale
            worst[dtype] = max(worst[dtype], (off if math.isfinite(off) else math.inf, key))
    for dtype, limit in (("float64", 1e-12), ("float32", 2e-5)):
        assert worst[dtype][0] < limit, f"{worst[dtype][1]} is off by {worst[dtype][0]:.1e}"
    return {"compared": len(results), "operations": len({case.name for case in CASES}),
            **{f"{dtype} off by at most": off for dtype, (off, _) in worst.items()}}  # fmt: skip


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: mz.SGD(lr=2.0, momentum=0.9),
    "adam": lambda: mz.Adam(lr=0.05, weight_decay=0.1),
    "adam master": lambda: mz.Adam(lr=0.05, master=True),
}


CASES: list[tuple[str, str, str, int, float | None]] = [  # problem, dtype, optimizer, micro-batches, clipping
    ("mlp", "float32", "sgd", 1, None), ("mlp", "float32", "adam", 3, 0.05),
    ("mlp", "bfloat16", "adam master", 1, None),
    ("gpt tied", "float32", "adam", 1, None), ("gpt tied", "bfloat16", "adam", 3, 0.05),
    ("gpt untied", "bfloat16", "sgd", 1, None), ("gpt dropout", "float32", "sgd", 1, None),
    ("shared", "float32", "sgd", 3, None), ("odd shapes", "bfloat16", "adam", 1, 0.05),
    ("wide", "bfloat16", "sgd", 3, None),
]  # fmt: skip


def train(stage: Any, problem: Any, dtype: str, optimizer: str, steps: int, micros: int, clip: float | None) -> Any:
    """All weights and moments after training, by name, and the losses."""
    comm = mz.Communicator()
    engine = stage(problem.build(0, dtype), OPTIMIZERS[optimizer](), comm)
    start, losses = engine.gather_parameters(), []
    for step in range(steps):
        for micro in range(micros):
            batch = problem.draw(np.random.default_rng([step, comm.rank, micro]), 4, dtype)
            loss = problem.loss(engine, batch)
            engine.backward(loss)
            losses.append(loss)
        if clip:
            engine.clip_grad_norm(clip)
        engine.step()
    found = engine.gather_parameters()
    for name, x in found.items():
        frozen = not dict(engine.model.named_parameters())[name].requires_grad
        assert frozen or not x.size or x.tobytes() != start[name].tobytes(), f"{name} has not moved: nothing is proved"
    for name, state in engine.gather_optimizer_state().items():
        found.update({f"{name} {key}": x for key, x in state.items()})
    return found, [loss.item() for loss in losses]


def bits() -> Found:
    """The four stages, bit by bit on every rank, in float32 and bfloat16; and near NumPy's losses, where those came."""
    from models import PROBLEMS

    tensors = runs = 0
    first: dict[str, list[float]] = {}
    for name, dtype, optimizer, micros, clip in CASES:
        truth: dict[str, Any] = {}
        for stage in mz.STAGES:
            found, losses = train(stage, PROBLEMS[name], dtype, optimizer, 2, micros, clip)
            truth, wanted = truth or found, first.setdefault(f"{name} {dtype} {optimizer}", losses)
            where = f"rank {world.rank} of {world.size}, {name}, {dtype}, {optimizer}, {stage.__name__}"
            assert losses == wanted, f"{where}: losses {losses} instead of {wanted}"
            assert found.keys() == truth.keys(), where
            for key, x in found.items():
                different = x.tobytes() != truth[key].tobytes()
                assert x.dtype == truth[key].dtype and not different, f"{where}: {key} differs"
            tensors, runs = tensors + len(found), runs + 1
    return {"runs": runs, "tensors": tensors, "losses": first}


def repeats() -> Found:
    """Twenty times the same training: one hash of all bits. Ids repeat, so that additions meet."""
    hashes = set()
    generator = np.random.default_rng(world.rank)
    tokens, targets = generator.integers(0, 3, (8, 16)), generator.integers(0, 11, (8, 16))
    for _ in range(20):
        model = nn.GPT(vocab=11, context=16, width=64, heads=4, layers=2, dropout=0.1, dtype="bfloat16")
        engine = mz.Zero3(model, mz.Adam(0.01), mz.Communicator())
        for _ in range(2):
            loss = F.cross_entropy(engine(tokens), targets)
            engine.backward(loss)
            engine.clip_grad_norm(0.5)
            engine.step()
        digest = hashlib.sha256(repr(loss.item()).encode())
        for x in (*engine.gather_parameters().values(),
                  *(x for state in engine.gather_optimizer_state().values() for x in state.values())):  # fmt: skip
            digest.update(x.tobytes())
        hashes.add(digest.hexdigest())
    sums = {scattered() for _ in range(20)}
    assert len(hashes) == len(sums) == 1, f"rank {world.rank}: {len(hashes)} different results, {len(sums)} of sums"
    return {"hash": hashes.pop()[:16], "repeats": 20}


def generator_like(x: mz.Tensor) -> Any:
    return np.random.default_rng(5).standard_normal(x.shape).astype(np.float32)


def scattered() -> str:
    """The gradient of rows that were taken thousands of times."""
    weight = mz.Tensor(np.zeros((7, 33), np.float32), True)
    rows = F.embedding(weight, np.random.default_rng(1).integers(0, 7, 20_000))
    rows.backward(generator_like(rows))
    assert weight.grad is not None
    return hashlib.sha256(to_host(weight.grad).tobytes()).hexdigest()


def rings() -> Found:
    """The sums of an all-reduce, and how many bytes a second a rank sends and receives in it."""
    comm = mz.Communicator()
    found: Found = {"way": type(comm._transport).__name__, "why": transport.cuda_aware()[1], "GB/s": {}}
    for kib in (64, 1024, 16 * 1024, 64 * 1024) if backend.name == "cupy" and "quick" not in sys.argv else (64, 1024):
        elements = kib * 256 // comm.size * comm.size
        vector = xp.full(elements, comm.rank + 1, np.float32)
        ring.all_reduce(comm, vector)
        total = comm.size * (comm.size + 1) / 2
        assert float(vector.min()) == float(vector.max()) == total, f"rank {comm.rank}: wrong sum of {kib} KiB"
        wait()
        start, times = time.perf_counter(), 0
        while times < 3 or (times < 20 and kib <= 1024):
            ring.all_reduce(comm, vector)
            times += 1
        wait()
        seconds = comm.mpi.allreduce(time.perf_counter() - start, MPI.MAX) / times
        sent = 2 * (comm.size - 1) / comm.size * 4 * elements
        found["GB/s"][f"{kib} KiB"] = round(sent / seconds / 1e9, 4)
    return found


def peaks() -> Found:
    """The largest moments of the second step: measured by the pool, predicted by the replay."""
    comm = mz.Communicator()
    table: Found = {}
    worst = 0.0
    rows, width, layers = 64, 256, 8
    x = np.ones((rows, width), np.float32)
    y = np.arange(rows) % width
    for stage, word in zip(mz.STAGES, plan.STAGES, strict=True):
        engine = stage(nn.MLP([width] * (layers + 1), dtype="bfloat16"), mz.Adam(), comm)
        for _ in range(3):
            with memory.measure(engine) as seen:
                engine.backward(F.cross_entropy(engine(x), y))
                engine.step()
        predicted = plan.peaks(plan.mlp([width] * (layers + 1), rows), plan.Recipe(), word, comm.size)
        measured = {phase: sum(terms.values()) - terms["other"] for phase, terms in seen.peaks.items()}
        here = 0 if backend.ON_HOST else x.nbytes + y.nbytes  # a GPU has a copy of the batch
        for phase in ("forward", "backward", "step"):
            foretold = sum(predicted[phase].values())
            off = (measured[phase] - foretold) / foretold
            allowed = 0.03 + here / foretold
            worst = max(worst, abs(off))
            assert -0.03 < off < allowed, f"rank {comm.rank}, {word}, {phase}: {measured[phase]}, predicted {foretold}"
        table[word] = {
            "measured": max(measured.values()),
            "predicted": max(sum(t.values()) for t in predicted.values()),
        }
    totals = [row["measured"] for row in table.values()]
    assert comm.size == 1 or totals == sorted(totals, reverse=True), f"peaks do not fall from stage to stage: {totals}"
    if backend.name == "cupy":
        table["pool, whole process"] = xp.get_default_memory_pool().total_bytes()
    return {"bytes": table, "off by at most": worst}


def speed() -> Found:
    """Seconds per step of each stage, after a first one: a GPT in bfloat16."""
    comm = mz.Communicator()
    small = backend.name != "cupy" or "quick" in sys.argv
    width, layers, time_, batch, steps = (32, 2, 16, 2, 3) if small else (512, 8, 256, 8, 10)
    generator = np.random.default_rng(comm.rank)
    tokens, targets = (generator.integers(0, 1000, (batch, time_)) for _ in range(2))
    found: Found = {}
    for stage, word in zip(mz.STAGES, plan.STAGES, strict=True):
        model = nn.GPT(vocab=1000, context=time_, width=width, heads=8, layers=layers, dtype="bfloat16")
        engine = stage(model, mz.Adam(1e-4), comm)
        for step in range(steps + 1):
            if step == 1:
                wait()
                comm.mpi.Barrier()
                start = time.perf_counter()
            engine.backward(F.cross_entropy(engine(tokens), targets))
            engine.step()
        wait()
        found[word] = round(comm.mpi.allreduce(time.perf_counter() - start, MPI.MAX) / steps, 5)
        parameters = sum(unit.size for unit in engine.units)
        del engine, model
    return {"seconds per step": found, "parameters": parameters, "tokens per rank": batch * time_}


PARTS: dict[str, Callable[..., Found]] = {
    "machine": machine, "operations": operations, "bits": bits, "repeats": repeats, "rings": rings, "peaks": peaks,
    "speed": speed,
}  # fmt: skip

if __name__ == "__main__":
    given = [argument for argument in sys.argv[2:] if argument != "quick"]
    start = time.perf_counter()
    result = PARTS[sys.argv[1]](*given)
    if world.rank == 0:
        print(json.dumps(result | {"ranks": world.size, "seconds": round(time.perf_counter() - start, 2)}), flush=True)
