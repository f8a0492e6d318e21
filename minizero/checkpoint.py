"""What must be saved so that a training goes on as if it had never stopped, on any N, under any stage?

    run/step-120/weights.safetensors      every parameter, whole, by name
    run/step-120/optimizer.safetensors    every moment, as "exp_avg.layers.0.weight"
    run/step-120/state.json               steps, seed, optimizer settings, what the caller adds, checksums
    run/latest                            one line: step-120

No rank, stage or padding leaves a trace in these files: the same state has the same bytes, whoever saved it. How each
rank writes and reads its own part is in tensor_file.py. All ranks need the same file system.

A checkpoint is made in a directory beside, flushed to the disk, and renamed: whenever a save is killed, the one before
it still loads. Everything is looked at before anything is loaded. There is no pickle: loading runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import ring
from .agreement import exchange_facts, shares
from .backend import Array
from .comm import Communicator
from .flat import Unit
from .tensor_file import CheckpointError, TensorFile, Tensors, Vector

if TYPE_CHECKING:
    from .engine import Engine

FORMAT = "minizero checkpoint 1"
WEIGHTS, MOMENTS, STATE, LATEST = "weights.safetensors", "optimizer.safetensors", "state.json", "latest"
SENTENCE = 500  # bytes of an error that the other ranks are told

Result = TypeVar("Result")


def save(engine: Engine, path: str | Path, extra: Any = None, keep_last: int | None = None) -> Path:
    """See `Engine.save`."""
    comm, root, name = engine.comm, Path(path), f"step-{engine.steps}"
    if any(unit.gradient is not None or unit.local is not None for unit in engine.units):
        raise RuntimeError("save: there are gradients that no step has used: call step() or zero_grad() first")
    if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
        raise ValueError(f"save: keep_last must be at least 1, not {keep_last!r}")
    optimizer = {"name": type(engine.optimizer).__name__, "settings": engine.optimizer.settings()}
    state = {"format": FORMAT, "steps": engine.steps, "seed": engine.model.seed, "optimizer": optimizer, "extra": extra}
    if as_json(json.loads(as_json(state))) != as_json(state):
        raise TypeError("save: extra has keys that are the same in JSON, which has no others than strings")
    same_everywhere(comm, "save: path, keep_last, extra and the optimizer's settings", path, as_json(state), keep_last)
    beside, final = root / f".{name}.saving", root / name
    task, weights, moments = f"save to {final}", *files(engine, beside)
    own = list(own_moments(engine))

    def create() -> None:
        if comm.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            tidy(root)
            beside.mkdir()
            weights.create()
            moments.create()

    def write() -> None:
        weights.write(("", unit, unit.chunk, unit.own(whole_or_chunk(unit))) for unit in engine.units)
        moments.write(own)

    def publish() -> None:
        if comm.rank == 0:
            put(beside / STATE, json.dumps({**state, "checksum": checksum(state)}, indent=1, default=plain))
            sync(beside)
            if final.exists():  # the same step again: `newest` finds it under this name, too
                os.rename(final, root / f".{name}.gone")
            os.rename(beside, final)
            put(root / f".{LATEST}", name)
            os.replace(root / f".{LATEST}", root / LATEST)
            sync(root)
            for folder in [f for f in saved_in(root) if f != final][: 1 - keep_last or None] if keep_last else []:
                os.rename(folder, root / f".{folder.name}.gone")
            for gone in root.glob(".step-*.gone"):
                remove(gone)

    try:
        together(comm, task, create)
        together(comm, task, write)
        state["checksums"] = checksums(comm, task, weights, moments)
        together(comm, task, publish)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return final


def load(engine: Engine, path: str | Path) -> Any:
    """See `Engine.load`."""
    comm, task, kind = engine.comm, f"load from {path}", type(engine.optimizer).__name__

    def look() -> tuple[dict[str, Any], TensorFile, TensorFile]:
        folder = newest(path)
        state = read_state(folder)
        theirs = state["optimizer"]["name"]
        if theirs != kind:
            raise CheckpointError(f"{folder} was saved with the optimizer {theirs}, but here is {kind}; load_weights "
                                  "takes the weights alone")  # fmt: skip
        both = files(engine, folder, state["steps"] > 0)
        for file in both:
            file.check()
        for unit in engine.units:
            whole_or_chunk(unit)
        return state, *both

    state, weights, moments = together(comm, task, look)
    same_everywhere(comm, f"{task}: what the ranks find there", state["checksum"])
    found = checksums(comm, task, weights, moments)
    for name, crcs in state["checksums"].items():
        wrong = [i for i, (now, then) in enumerate(zip(found[name], crcs, strict=True)) if now != then]
        if wrong:
            raise CheckpointError(f"{task}: {name} was damaged after it was saved: {len(wrong)} of {len(crcs)} "
                                  f"checksums differ, the first of block {wrong[0]}")  # fmt: skip

    if state["steps"]:
        engine.make_states()
    for unit in engine.units:
        unit.version += 1
        unit.state = unit.state if state["steps"] else None
    own = list(own_moments(engine, all_of_it=True))

    def read() -> None:
        weights.read(
            ("", unit, slice(0, unit.length) if unit.weights.size == unit.length else unit.chunk, unit.weights)
            for unit in engine.units
        )
        moments.read(own)

    together(comm, f"{task} broke off, and the engine is torn: make a new one", read)
    for key, value in state["optimizer"]["settings"].items():
        setattr(engine.optimizer, key, tuple(value) if isinstance(value, list) else value)
    engine.steps = state["steps"]
    engine.model.seed = engine.noise.seed = state["seed"]
    engine.zero_grad()
    return state["extra"]


def files(engine: Engine, folder: Path, stepped: bool | None = None) -> tuple[TensorFile, TensorFile]:
    """The two files of an engine: all parameters; and what its optimizer keeps for them, once it has `stepped`."""
    named = list(engine.model.named_parameters())
    kept = {}
    for unit in engine.units:
        if unit.trainable and (engine.steps > 0 if stepped is None else stepped):
            kept.update(dict.fromkeys(unit.parameters, engine.optimizer.init(np.empty(0, unit.dtype))))
    weights: Tensors = {name: (p.dtype, p.shape) for name, p in named}
    moments = {f"{key}.{name}": (v.dtype, p.shape) for name, p in named for key, v in kept.get(p, {}).items()}
    return TensorFile(folder / WEIGHTS, weights), TensorFile(folder / MOMENTS, moments)


def own_moments(engine: Engine, all_of_it: bool = False) -> Iterator[Vector]:
    """What this rank's optimizer keeps; of what everybody keeps only its own chunk, if not `all_of_it`. Collective."""
    for unit, (part, everywhere) in shares(engine).items():
        if part.step != 1:
            raise ValueError(f"{type(engine).__name__}.mine gives a rank elements of {unit.name} that do not lie side "
                             "by side: they cannot be saved or loaded")  # fmt: skip
        cut = everywhere and not all_of_it
        for key, array in (unit.state or {}).items():
            yield f"{key}.", unit, unit.chunk if cut else part, array[unit.chunk] if cut else array


def whole_or_chunk(unit: Unit) -> Array:
    """What this rank holds of a unit's weights. Raises CheckpointError where that is neither all, nor its chunk."""
    if unit.weights.size not in (unit.length, unit.chunk.stop - unit.chunk.start):
        raise CheckpointError(f"this stage holds {unit.weights.size} elements of {unit.name}, which is neither all "
                              f"{unit.length} nor the rank's own chunk of them")  # fmt: skip
    return unit.weights


# Agreeing with the other ranks.


def together(comm: Communicator, task: str, action: Callable[[], Result]) -> Result:
    """Do something on this rank; if it fails on any, raise on all alike, with the reason. Collective."""
    fault, result, mine = "", None, None
    try:
        result = action()
    except (OSError, CheckpointError, MemoryError) as error:
        fault, mine = str(error) or repr(error), error
    table = np.zeros((comm.size, SENTENCE), np.uint8)
    text = fault.encode(errors="backslashreplace")[:SENTENCE]
    table[comm.rank, : len(text)] = list(text)
    with comm.label("control"):
        ring.all_gather(comm, table.reshape(-1))
    for rank, row in enumerate(table):
        if row.any():
            reason = row.tobytes().rstrip(b"\0").decode(errors="ignore")
            raise mine if isinstance(mine, MemoryError) else CheckpointError(f"{task}: {reason} (found on rank {rank})")
    return result  # type: ignore[return-value]


def same_everywhere(comm: Communicator, what: str, *facts: Any) -> None:
    """Raise on every rank where facts differ between ranks. Collective."""
    table = exchange_facts(comm, *(zlib.crc32(str(fact).encode(errors="backslashreplace")) for fact in facts))
    others = np.flatnonzero((table != table[0]).any(axis=1)).tolist()
    if others:
        raise ValueError(f"{what}: must be the same on all ranks, but differ on ranks {others} from rank 0")


def checksums(comm: Communicator, task: str, *both: TensorFile) -> dict[str, list[int]]:
    """The checksums of all blocks of the files, by file. Collective: each rank reads its share."""
    mine = together(comm, task, lambda: [file.checksums(comm.rank, comm.size) for file in both])
    found = {}
    for file, crcs in zip(both, mine, strict=True):
        table = np.zeros((comm.size, crcs.size), np.uint32)
        table[comm.rank] = crcs
        with comm.label("control"):
            ring.all_gather(comm, table.reshape(-1))
        found[file.path.name] = table.reshape(-1)[: file.blocks].tolist()
    return found


# The directory.


def newest(path: str | Path) -> Path:
    """The checkpoint that `path` is, or the latest in it. Raises CheckpointError where there is none."""
    path = Path(path)
    if (path / STATE).exists():
        return path
    try:
        name = (path / LATEST).read_text().strip()
    except (OSError, ValueError):
        raise CheckpointError(f"there is no checkpoint in {path}: it has neither {STATE} nor {LATEST}") from None
    if not re.fullmatch(r"step-\d+", name):
        raise CheckpointError(f"{path / LATEST} should name a checkpoint, such as step-120, but says {name[:40]!r}")
    gone = path / f".{name}.gone"  # put aside by a save that was killed: see `save`
    return gone if gone.exists() and not (path / name).exists() else path / name


def saved_in(root: Path) -> list[Path]:
    """The checkpoints in a directory, in the order in which they were saved: that of the times of state.json."""
    found = [f for f in root.glob("step-*") if re.fullmatch(r"step-\d+", f.name) and (f / STATE).exists()]
    return sorted(found, key=lambda folder: ((folder / STATE).stat().st_mtime_ns, len(folder.name), folder.name))


def tidy(root: Path) -> None:
    """Remove what killed saves have left, and bring back what they had put aside."""
    for leftover in root.glob(".step-*.saving"):
        remove(leftover)
    for gone in root.glob(".step-*.gone"):
        if (root / gone.stem[1:]).exists():
            remove(gone)
        else:
            os.rename(gone, root / gone.stem[1:])


def remove(path: Path) -> None:
    """Remove a directory with all that is in it; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def put(path: Path, text: str) -> None:
    """Write a text, and wait until it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Wait until a directory's names are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# state.json


def read_state(folder: Path) -> dict[str, Any]:
    """What state.json says. Raises CheckpointError where it is not whole, or not one of ours."""
    file = folder / STATE
    try:
        state = json.loads(file.read_text())
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{file} has format {state.get('format')!r}, not {FORMAT!r}")
        told = state.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from None
    if told != checksum(state):
        raise CheckpointError(f"{file} was changed after it was saved: its checksum is wrong")
    return {**state, "checksum": told}


def checksum(state: dict[str, Any]) -> int:
    return zlib.crc32(as_json(state).encode())


def as_json(state: dict[str, Any]) -> str:
    """As one line. Raises TypeError for what JSON cannot hold."""
    return json.dumps(state, default=plain)


def plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"save: extra and the optimizer's settings must be what JSON can hold, and {type(value).__name__} "
                    "is not: use numbers, strings, lists and dicts (an array's .tolist(), say)")  # fmt: skip
