"""Files that must not be loaded, saves that cannot be made: one sentence on all ranks, and nothing has changed.

mpirun -n 3 python tests/jobs/checkpoint_refusals.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import expect
import numpy as np
from checkpoint_recipes import differences, state_of
from safetensors.numpy import load_file, save_file

import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.backend import xp

comm = mz.Communicator()
root = Path(sys.argv[1])
good = root / "good"


def fresh(
    stage: type[mz.Engine], sizes: tuple[int, ...] = (5, 4, 3), optimizer: Any = None, dtype: str = "float32"
) -> mz.Engine:
    return stage(nn.MLP(sizes, dtype=dtype), optimizer or mz.Adam(0.1), comm)


def step(engine: mz.Engine) -> None:
    x = np.random.default_rng([engine.steps, comm.rank]).standard_normal((2, 5)).astype("float32")
    engine.backward(F.cross_entropy(engine(x), np.array([0, 2])))
    engine.step()


def only_rank_0(action: Callable[[], Any]) -> None:
    if comm.rank == 0:
        action()
    comm.mpi.Barrier()


def refused(kind: type[Exception], action: Callable[[], Any], *words: str, alike: bool = True) -> None:
    """The action raises `kind` on every rank, in the same words."""
    said = expect.raises(kind, action, *words, what=f"rank {comm.rank}")
    everywhere = comm.mpi.allgather(said)
    assert not alike or len(set(everywhere)) == 1, everywhere


def flip(file: str, place: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[int(place * (len(data) - 1))] ^= 16
        (folder / file).write_bytes(data)

    return spoil


def cut(file: str, by: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - by)


def write(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_bytes(content)


def rewrite(file: str) -> Callable[[Path], None]:
    return lambda folder: save_file(dict(reversed(load_file(folder / file).items())), folder / file)


def directory(file: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return spoil


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))

    return spoil


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {root / 'exploded'}",)


WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
DAMAGE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "weights cut short": (cut(WEIGHTS, 1), (WEIGHTS, "not a whole safetensors file")),
    "moments cut short": (cut(MOMENTS, 40), (MOMENTS, "not a whole safetensors file")),
    "weights empty": (write(WEIGHTS, b""), (WEIGHTS, "not a whole safetensors file")),
    "weights longer": (lambda f: (f / WEIGHTS).open("ab").write(b"x"), (WEIGHTS, "not a whole safetensors file")),
    "a pickle for weights": (write(WEIGHTS, pickle.dumps(Bomb())), (WEIGHTS, "not a whole safetensors file")),
    "a pickle for state": (write(STATE, pickle.dumps(Bomb())), (STATE, "cannot be read")),
    "a bit of the weights": (flip(WEIGHTS, 0.9), (WEIGHTS, "damaged")),
    "the last bit of the moments": (flip(MOMENTS, 1), (MOMENTS, "damaged")),
    "weights written by another program": (rewrite(WEIGHTS), (WEIGHTS, "not written by engine.save")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), (WEIGHTS, "No such file")),
    "no moments": (lambda f: (f / MOMENTS).unlink(), (MOMENTS, "No such file")),
    "a directory for weights": (directory(WEIGHTS), (WEIGHTS,)),
    "other steps in state": (edit(lambda s: s.update(steps=7)), (STATE, "changed after it was saved")),
    "another lr in state": (edit(lambda s: s["optimizer"]["settings"].update(lr=9)), (STATE, "changed after")),
    "another extra in state": (edit(lambda s: s.update(extra=9)), (STATE, "changed after it was saved")),
    "half a state": (cut(STATE, 100), (STATE, "cannot be read")),
    "a later format": (edit(lambda s: s.update(format="minizero checkpoint 2")), ("minizero checkpoint 2", "not '")),
    "a list for state": (write(STATE, b"[]"), (STATE, "cannot be read")),
    "no checksum in state": (edit(lambda s: s.pop("checksum")), (STATE, "cannot be read")),
}


def damage(spoil: Callable[[Path], Any]) -> None:
    shutil.rmtree(root / "bad", ignore_errors=True)
    shutil.copytree(good, root / "bad")
    spoil(root / "bad" / "step-2")


def damaged_files_are_refused() -> None:
    source = fresh(mz.Zero2)
    step(source)
    step(source)
    source.save(good, extra={"a": 1})
    for stage in (mz.DataParallel, mz.Zero3):
        engine = fresh(stage)
        step(engine)
        before = state_of(engine)
        for title, (spoil, words) in DAMAGE.items():
            only_rank_0(partial(damage, spoil))
            refused(mz.CheckpointError, partial(engine.load, root / "bad"), *words)
            assert engine.steps == 1 and not differences(before, state_of(engine)), f"{title}: something has changed"
        step(engine)
        assert engine.load(good) == {"a": 1} and engine.steps == 2
    assert not (root / "exploded").exists(), "loading ran code"


def other_models_are_refused_with_the_names_that_differ() -> None:
    for stage in mz.STAGES:
        wider, deeper, shallower = fresh(stage, (5, 6, 3)), fresh(stage, (5, 4, 4, 3)), fresh(stage, (5, 3))
        refused(mz.CheckpointError, partial(wider.load, good), "layers.0.weight (F32 (4, 5), here F32 (6, 5))")
        refused(mz.CheckpointError, partial(deeper.load, good), "lacks layers.2.weight", "layers.1.bias (F32 (3,)")
        refused(mz.CheckpointError, partial(shallower.load, good), "also has", "layers.1.weight")
        half = fresh(stage, dtype="bfloat16")
        refused(mz.CheckpointError, partial(half.load, good), "layers.1.bias (F32 (3,), here BF16 (3,))")
        sgd = fresh(stage, optimizer=mz.SGD(0.1, momentum=0.9))
        refused(mz.CheckpointError, partial(sgd.load, good), "optimizer Adam", "here is SGD", "load_weights")
        frozen = nn.MLP((5, 4, 3))
        frozen.layers[0].weight.requires_grad = False
        engine = stage(frozen, mz.Adam(0.1), comm)
        refused(mz.CheckpointError, partial(engine.load, good), "also has exp_avg.layers.0.")
    heavy = fresh(mz.Zero1, optimizer=mz.SGD(0.1, momentum=0.9))
    step(heavy)
    heavy.save(root / "heavy")
    light = fresh(mz.Zero1, optimizer=mz.SGD(0.1))
    refused(mz.CheckpointError, lambda: light.load(root / "heavy"), "also has momentum_buffer.")


def what_is_no_checkpoint_is_refused() -> None:
    engine = fresh(mz.Zero1)
    empty = root / "empty"

    def prepare() -> None:
        for name, latest in (("empty", ""), ("odd", "../../etc"), ("gone", "step-3")):
            (root / name).mkdir()
            if latest:
                (root / name / "latest").write_text(latest)

    only_rank_0(prepare)
    refused(mz.CheckpointError, lambda: engine.load(empty), "there is no checkpoint in", "empty")
    refused(mz.CheckpointError, lambda: engine.load(root / "nowhere"), "there is no checkpoint in", "nowhere")
    refused(mz.CheckpointError, lambda: engine.load(root / "odd"), "latest", "step-120", "../../etc")
    refused(mz.CheckpointError, lambda: engine.load(root / "gone"), "step-3", "cannot be read")
    if comm.size > 1:
        save_elsewhere = fresh(mz.Zero1)
        step(save_elsewhere)
        save_elsewhere.save(root / "elsewhere")
        refused(ValueError, partial(engine.load, [good, root / "elsewhere"][comm.rank > 0]), "ranks", alike=False)


@contextmanager
def full_disk(rank: int) -> Any:
    """Files of this rank cannot grow beyond 100 bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def a_save_that_fails_leaves_the_one_before() -> None:
    for stage in mz.STAGES:
        engine, where = fresh(stage), root / f"full {stage.__name__}"
        step(engine)
        engine.save(where, extra="first")
        saved = state_of(engine)
        step(engine)
        for rank in range(comm.size):
            with full_disk(rank):
                refused(mz.CheckpointError, partial(engine.save, where, "second"), "step-2", f"rank {rank}")
            assert sorted(p.name for p in where.iterdir()) == ["latest", "step-1"], list(where.iterdir())
            comm.mpi.Barrier()
        again = fresh(stage)
        assert again.load(where) == "first" and not differences(saved, state_of(again))
        engine.save(where, "second")
        assert again.load(where) == "second" and again.steps == 2
    only_rank_0(lambda: (root / "file").write_text(""))
    refused(mz.CheckpointError, lambda: engine.save(root / "file"), "file")
    refused(mz.CheckpointError, lambda: engine.save(root / "file" / "below"), "file")


def what_cannot_be_saved_is_refused_before_anything_is_written() -> None:
    engine, where = fresh(mz.Zero2), root / "never"
    x = np.ones((2, 5), "float32")
    engine.backward(F.cross_entropy(engine(x), np.array([0, 2])))
    refused(RuntimeError, lambda: engine.save(where), "gradients that no step has used")
    with engine.no_sync():
        engine.zero_grad()
        engine.backward(F.cross_entropy(engine(x), np.array([0, 2])))
    refused(RuntimeError, lambda: engine.save(where), "gradients that no step has used")
    engine.zero_grad()
    keeps: tuple[Any, ...] = (0, -1, 2.0, "3")
    for keep in keeps:
        refused(ValueError, partial(engine.save, where, keep_last=keep), "keep_last must be at least 1")
    refused(TypeError, lambda: engine.save(where, extra={"a": np.zeros(3)}), "ndarray", ".tolist()")
    refused(TypeError, lambda: engine.save(where, extra=engine), "Zero2", "JSON")
    refused(TypeError, lambda: engine.save(where, extra={1: "a", "1": "b"}), "keys that are the same in JSON")
    if comm.size > 1:
        refused(ValueError, lambda: engine.save(where, keep_last=1 + comm.rank), "keep_last", "same on all ranks")
        refused(ValueError, lambda: engine.save(where, extra=comm.rank), "extra", f"ranks {[*range(1, comm.size)]}")
        refused(ValueError, lambda: engine.save(root / f"never {comm.rank}"), "path", "same on all ranks")
        engine.optimizer.lr = 0.1 * (1 + comm.rank // (comm.size - 1))
        refused(ValueError, lambda: engine.save(where), "optimizer's settings", f"ranks [{comm.size - 1}]")
    assert not any(root.glob("never*")), list(root.iterdir())


class Interleaved(mz.Zero1):
    """A stage of one's own in which rank r updates every N-th element."""

    def mine(self, unit: Any, vector: Any) -> Any:
        return vector[self.comm.rank :: self.comm.size]

    def publish(self, unit: Any) -> None:
        whole = xp.zeros_like(unit.weights)
        self.mine(unit, whole)[:] = self.mine(unit, unit.weights)
        unit.weights[:] = mz.ring.all_reduce(self.comm, whole)


class Server(mz.DataParallel):
    """Rank 0 alone keeps the weights."""

    def place(self, unit: Any) -> None:
        unit.weights = unit.weights if self.comm.rank == 0 else unit.weights[:0].copy()


class Half(mz.Zero1):
    def mine(self, unit: Any, vector: Any) -> Any:
        return unit.own(vector)[: unit.own(vector).size // 2]


def a_stage_whose_elements_lie_apart_can_train_and_is_told_that_it_cannot_save() -> None:
    engine = fresh(Interleaved)
    step(engine)
    truth = fresh(mz.DataParallel)
    step(truth)
    assert not differences(state_of(engine), state_of(truth)), "the stage itself is wrong"
    if comm.size > 1:
        refused(ValueError, lambda: engine.save(root / "never"), "Interleaved.mine", "side by side")
    if comm.size > 1:
        refused(mz.CheckpointError, lambda: fresh(Server).save(root / "server"), "neither all", "rank 1")
        refused(mz.CheckpointError, lambda: fresh(Server).load(good), "neither all", "rank 1")
        assert not list((root / "server").iterdir())
    refused(ValueError, lambda: fresh(Half).save(root / "never"), "Half.mine", "neither all to each, nor each to one")


def a_save_that_rank_0_alone_makes_stops_all_and_says_so() -> None:
    if comm.size > 1:
        part = comm.split(0)  # of its own, as the error breaks it
        engine = mz.Zero2(nn.MLP((5, 4, 3)), mz.Adam(0.1), part)
        x = np.ones((2, 5), "float32")
        loss = F.cross_entropy(engine(x), np.array([0, 2]))
        alone = partial(engine.save, root / "alone") if part.rank == 0 else partial(engine.backward, loss)
        expect.raises(mz.CollectiveError, alone, "checkpoint", "reduce_scatter of layers.1", "same collectives")


def directories_are_kept_in_the_order_of_saving() -> None:
    where, engine = root / "several", fresh(mz.Zero3)
    for _ in range(3):
        step(engine)
        engine.save(where)
    engine.save(where, extra="again", keep_last=2)  # the same step once more
    names = sorted(p.name for p in where.iterdir())
    assert names == ["latest", "step-2", "step-3"], names
    assert fresh(mz.Zero1).load(where) == "again"
    assert fresh(mz.Zero1).load(where / "step-2") is None
    comm.mpi.Barrier()
    engine.load(where / "step-2")  # back, and on another way: what was saved later stays, whatever its number
    engine.save(where / "fork")
    step(engine)
    step(engine)
    engine.save(where, keep_last=1)
    assert sorted(p.name for p in where.iterdir()) == ["fork", "latest", "step-4"]
    other = fresh(mz.DataParallel)
    other.load(where / "fork")
    other.save(where, keep_last=2)
    assert sorted(p.name for p in where.iterdir()) == ["fork", "latest", "step-2", "step-4"]
    step(other)
    other.save(where, keep_last=2)  # the two that were saved last
    assert sorted(p.name for p in where.iterdir()) == ["fork", "latest", "step-2", "step-3"]
    other.load(where / "fork")
    other.save(where)
    assert (where / "latest").read_text() == "step-2"


def settings_and_steps_come_back_as_they_were() -> None:
    engine = fresh(mz.Zero2, optimizer=mz.Adam(np.float64(0.125), (0.5, float(np.float32(0.75))), 1e-3, 0.25))
    step(engine)
    engine.optimizer.lr = np.float64(1) / 3
    extra: dict[str, Any] = {
        "half": 0.1 + 0.2,
        "none": None,
        "list": [1, "zwei", 2**80],
        "numbers": np.float32(0.1),
        "nested": {"ü": {}},
    }
    engine.save(root / "settings", extra)
    other = fresh(mz.DataParallel)
    back = other.load(root / "settings")
    assert back == {**extra, "numbers": float(np.float32(0.1))}, back
    assert other.optimizer.settings() == {**engine.optimizer.settings(), "betas": (0.5, 0.75)}, (
        other.optimizer.settings()
    )
    assert other.optimizer.lr == 1 / 3 and type(other.optimizer.lr) is float and other.steps == 1
    step(engine)
    step(other)  # a NumPy float64 as lr, and the float that it came back as
    assert not differences(state_of(engine), state_of(other))
    untouched = fresh(mz.Zero3)
    untouched.save(root / "new")
    step(other)
    other.load(root / "new")  # before the first step there are no moments
    assert other.steps == 0 and other.memory()["optimizer"] == 0
    step(other)
    step(untouched)
    assert not differences(state_of(other), state_of(untouched))


for claim in (
    damaged_files_are_refused,
    other_models_are_refused_with_the_names_that_differ,
    what_is_no_checkpoint_is_refused,
    a_save_that_fails_leaves_the_one_before,
    what_cannot_be_saved_is_refused_before_anything_is_written,
    a_stage_whose_elements_lie_apart_can_train_and_is_told_that_it_cannot_save,
    a_save_that_rank_0_alone_makes_stops_all_and_says_so,
    directories_are_kept_in_the_order_of_saving,
    settings_and_steps_come_back_as_they_were,
):
    claim()
    comm.mpi.Barrier()
    if comm.rank == 0:
        print(claim.__name__, flush=True)
