"""Save and resume: a training goes on as if it had never stopped, whoever saved it and whoever loads it."""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import minizero as mz
from launch import BIN, OPEN_MPI, ROOT, python_path, run_python, run_ranks
from minizero import functional as F
from minizero import memory, nn, optim, weights
from minizero.backend import bfloat16, to_host
from minizero.tensor_file import TensorFile

JOBS = "tests/jobs"


@pytest.mark.parametrize("n", [1, 3, 5])
def test_three_and_three_steps_are_six_for_every_stage_with_dropout_in_the_middle_of_an_epoch(
    n: int, tmp_path: Path
) -> None:
    assert "resumed" in run_ranks(n, f"{JOBS}/checkpoint_resume.py", tmp_path).stdout


def test_the_same_state_is_the_same_files_whatever_n_and_stage_saved_it(tmp_path: Path) -> None:
    saved = json.loads(run_ranks(4, f"{JOBS}/checkpoint_files.py", "save", tmp_path).stdout)
    assert len(saved) == 4 and all(len(files) == 3 for files in saved.values())
    for file in tmp_path.glob("*/step-3/*.safetensors"):  # torch maps a file, and needs its tensors aligned
        length = int.from_bytes(file.read_bytes()[:8], "little")
        table = json.loads(file.read_bytes()[8 : 8 + length])
        sizes = {"F32": 4, "F64": 8, "BF16": 2}
        assert all((8 + length + t["data_offsets"][0]) % sizes[t["dtype"]] == 0 for t in table.values()), file
    for n in (2, 3, 1, 8):
        assert json.loads(run_ranks(n, f"{JOBS}/checkpoint_files.py", "again", tmp_path).stdout) == saved, f"N = {n}"


@pytest.mark.parametrize("n", [1, 3])
def test_what_cannot_be_saved_or_loaded_is_refused_in_one_sentence_on_all_ranks(n: int, tmp_path: Path) -> None:
    assert run_ranks(n, f"{JOBS}/checkpoint_refusals.py", tmp_path).stdout.count("\n") == 9


def test_a_save_that_is_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    counts = [
        int(line.split()[-1]) for line in run_python(f"{JOBS}/checkpoint_moments.py", tmp_path).stdout.splitlines()
    ]
    assert len(counts) == 3 and min(counts) > 15, counts


def test_twenty_kills_at_random_moments_of_saving_are_followed_by_twenty_good_loads(tmp_path: Path) -> None:
    ranks, folders = 3, [tmp_path / str(i) for i in range(20)]
    truth = json.loads(run_ranks(ranks, f"{JOBS}/checkpoint_loop.py", "truth", 150).stdout)
    environment = {**os.environ, **OPEN_MPI, "PATH": os.pathsep.join([BIN, os.environ.get("PATH", os.defpath)])}
    command = ["mpiexec", "-n", str(ranks), "python", f"{JOBS}/checkpoint_loop.py", "train"]
    waits = [random.uniform(0, 0.2) for _ in folders]
    for folder, wait in zip(folders, waits, strict=True):
        job = subprocess.Popen(
            [*command, str(folder)], cwd=ROOT, env={**environment, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert job.stdout and job.stdout.readline() == b"saving\n"
        time.sleep(wait)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        job.stdout.close()
    left = [os.listdir(folder) for folder in folders]
    loaded = json.loads(run_python(f"{JOBS}/checkpoint_loop.py", "look", *folders).stdout)
    wrong = [(wait, steps) for wait, (steps, found) in zip(waits, loaded, strict=True) if truth[steps] != found]
    assert not wrong, f"after kills at (seconds, steps loaded) {wrong} the state is not that of the step"
    hits = sum(any(name.startswith(".") for name in found) for found in left)
    assert hits, f"none of the kills after {waits} seconds came in the middle of a save"


def test_saving_and_loading_gather_nothing(tmp_path: Path) -> None:
    assert "Zero3 load" in run_ranks(4, f"{JOBS}/checkpoint_memory.py", tmp_path).stdout


# Weights alone, to and from other programs


def weights_of(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: to_host(p.data) for name, p in model.named_parameters()}


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(
        (one[n].dtype, one[n].shape, one[n].tobytes()) == (two[n].dtype, two[n].shape, two[n].tobytes()) for n in one
    )


def gpt(seed: int, dtype: str = "float32", tied: bool = True) -> nn.GPT:
    return nn.GPT(vocab=7, context=4, width=6, heads=2, layers=1, seed=seed, dtype=dtype, tied=tied)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_go_to_a_file_that_safetensors_reads_and_come_back(dtype: str, tmp_path: Path) -> None:
    model, other, file = gpt(1, dtype), gpt(2, dtype), tmp_path / "weights.safetensors"
    mz.save_weights(model, file)
    assert same(load_file(file), weights_of(model))
    mz.load_weights(other, file)
    assert all(p.name == name for name, p in other.named_parameters())
    assert same(weights_of(other), weights_of(model)) and [p.name for p in tmp_path.iterdir()] == [file.name]
    tokens = np.array([[1, 2, 3]])
    assert to_host(other(tokens).data).tobytes() == to_host(model(tokens).data).tobytes()


@pytest.mark.parametrize("stage", mz.STAGES)
def test_a_checkpoints_weights_load_into_a_model_without_engine(stage: type[mz.Engine], tmp_path: Path) -> None:
    engine = stage(gpt(1, "bfloat16"), mz.Adam(0.1))
    engine.backward(F.cross_entropy(engine(np.array([[1, 2]])), np.array([[2, 3]])))
    engine.step()
    folder = engine.save(tmp_path)
    for path in (tmp_path, folder, folder / "weights.safetensors"):
        model = gpt(2, "bfloat16")
        mz.load_weights(model, path)
        assert same(weights_of(model), engine.gather_parameters())
    wide = gpt(3)
    mz.load_weights(wide, tmp_path)  # cast, as torch does
    assert all(np.array_equal(a, engine.gather_parameters()[n].astype("float32")) for n, a in weights_of(wide).items())
    again = mz.Zero3(wide, mz.Adam())
    assert same(again.gather_parameters(), {n: a.astype("float32") for n, a in engine.gather_parameters().items()})
    with pytest.raises(ValueError, match="wrapped by an engine: load weights before wrapping"):
        mz.load_weights(wide, tmp_path)
    with pytest.raises(ValueError, match=r"wrapped by an engine: engine\.save"):
        mz.save_weights(wide, tmp_path / "w")


def test_a_state_dict_as_torch_writes_it_loads_under_any_name_of_a_shared_weight(tmp_path: Path) -> None:
    source, file = weights_of_fresh(gpt(1)), tmp_path / "torch.safetensors"
    both = {**source, "head.weight": source["token.weight"]}  # a state_dict has both names of a tied weight
    other = {name: array for name, array in both.items() if name != "token.weight"}  # torch's save_model keeps one
    for state in (source, both, other):
        save_file(dict(sorted(state.items())), file, metadata={"format": "pt"})
        model = gpt(2)
        mz.load_weights(model, file)
        assert same(weights_of(model), source) and model.head.weight is model.token.weight
    half = {name: array.astype(bfloat16) for name, array in source.items()}
    save_file(half, file)
    mz.load_weights(model := gpt(2), file)
    assert all(np.array_equal(array, half[name].astype("float32")) for name, array in weights_of(model).items())


def weights_of_fresh(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    model.materialise()
    return weights_of(model)


def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    model, file = gpt(1), tmp_path / "w.safetensors"
    before = weights_of_fresh(model)
    truth = {name: array.copy() for name, array in before.items()}
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "lacks": ({n: a for n, a in truth.items() if n != "norm.gain"}, r"does not fit: it lacks norm\.gain$"),
        "more": ({**truth, "extra.weight": truth["norm.gain"]}, r"also has extra\.weight$"),
        "shape": ({**truth, "norm.gain": np.ones(5, "float32")}, r"differs in norm\.gain \(\(5,\), here \(6,\)\)$"),
        "integers": ({**truth, "norm.gain": np.ones(6, "int64")}, r"norm\.gain is I64"),
        "tied": (
            {**{n: a + 1 for n, a in truth.items()}, "head.weight": truth["token.weight"]},
            r"token\.weight and head\.weight are one",
        ),
    }
    for state, words in bad.values():
        save_file(state, file)
        with pytest.raises(mz.CheckpointError, match=words):
            mz.load_weights(model, file)
        assert same(weights_of(model), truth)
    file.write_bytes(b"no")
    with pytest.raises(mz.CheckpointError, match="not a whole safetensors file"):
        mz.load_weights(model, file)
    with pytest.raises(mz.CheckpointError, match="there is no checkpoint in"):
        mz.load_weights(model, tmp_path)
    with pytest.raises(mz.CheckpointError, match="No such file"):
        mz.load_weights(model, tmp_path / "nothing")
    with pytest.raises(TypeError, match=r"needs an nn.Module that no engine has wrapped, not Zero1"):
        mz.load_weights(mz.Zero1(gpt(1), mz.Adam()), file)  # type: ignore[arg-type]
    untouched = gpt(1)
    save_file({}, file)
    with pytest.raises(mz.CheckpointError, match="lacks"):
        mz.load_weights(untouched, file)
    assert same(weights_of_fresh(untouched), truth)


def test_weights_are_not_exchanged_between_forward_and_backward(tmp_path: Path) -> None:
    model, file = gpt(1), tmp_path / "w.safetensors"
    mz.save_weights(gpt(2), file)
    loss = F.cross_entropy(model(np.array([[1, 2]])), np.array([[2, 3]]))
    with pytest.raises(RuntimeError, match="its backward has not run"):
        mz.load_weights(model, file)
    loss.backward()
    mz.load_weights(model, file)


def test_what_a_killed_save_put_aside_comes_back_and_a_users_own_copies_stay(tmp_path: Path) -> None:
    engine = mz.Zero1(gpt(1), mz.Adam())
    engine.save(tmp_path, extra="old")
    shutil.copytree(tmp_path / "step-0", tmp_path / "step-0-best")
    (tmp_path / "step-0").rename(tmp_path / ".step-0.gone")
    (tmp_path / ".step-9.saving").write_text("")
    (tmp_path / "step-7").symlink_to(tmp_path / "step-0-best")
    assert engine.load(tmp_path) == "old"
    engine.backward(F.cross_entropy(engine(np.array([[1, 2]])), np.array([[2, 3]])))
    engine.step()
    engine.save(tmp_path)
    assert engine.load(tmp_path / "step-0") == "old"
    engine.save(tmp_path, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0", "step-0-best"]
    assert engine.load(tmp_path / "step-0-best") == "old"


def test_all_is_flushed_to_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, Any]] = []

    def noted(what: str, act: Any, subject: Any) -> Any:
        def noting(*given: Any) -> None:
            events.append((what, subject(*given)))
            act(*given)

        return noting

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync, lambda number: os.fstat(number).st_ino))
    monkeypatch.setattr(os, "rename", noted("rename", os.rename, lambda _, new: Path(new).name))
    monkeypatch.setattr(os, "replace", noted("replace", os.replace, lambda _, new: Path(new).name))
    folder = mz.Zero1(gpt(1), mz.Adam()).save(tmp_path)
    first = events.index(("rename", "step-0"))
    flushed = {inode for what, inode in events[:first] if what == "fsync"}
    assert flushed >= {path.stat().st_ino for path in (folder, *folder.iterdir())}, events
    last = events.index(("replace", "latest"))
    assert first < last and ("fsync", (tmp_path / "latest").stat().st_ino) in events[:last]
    assert ("fsync", tmp_path.stat().st_ino) in events[last:]


def test_out_of_memory_while_loading_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    def make() -> mz.Engine:
        return mz.Zero1(nn.MLP([300, 200, 100, 3]), mz.Adam())

    source = make()
    source.backward(F.cross_entropy(source(np.ones((1, 300), "float32")), np.array([1])))
    source.step()
    source.save(tmp_path / "run")
    for thing in gc.get_objects():
        if type(thing) is optim.Scratch:
            thing.arrays.clear()  # of other tests: it would count
    engine = make()
    with pytest.raises(memory.OutOfMemory) as refused, memory.budget("1200 kB", engine):
        engine.load(tmp_path / "run")
    assert refused.value.unit == "layers.1", "the first unit's moments should have been made by then"
    assert engine.steps == 0 and all(unit.state is None for unit in engine.units)
    engine.save(tmp_path / "other")
    engine.load(tmp_path / "run")
    assert engine.steps == 1 and same(engine.gather_parameters(), source.gather_parameters())


def test_a_read_that_breaks_off_says_that_the_engine_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mz.Zero2(gpt(1), mz.Adam())
    engine.save(tmp_path)

    def broken(*given: Any) -> None:
        raise OSError("the cable was pulled")

    monkeypatch.setattr(TensorFile, "read", broken)
    with pytest.raises(mz.CheckpointError, match="engine is torn: make a new one: the cable was pulled"):
        engine.load(tmp_path)


def test_a_module_that_knows_its_parent_can_be_loaded(tmp_path: Path) -> None:
    layer = nn.Linear(2, 3)
    model = nn.Sequential(layer)
    layer.parent = model  # type: ignore[attr-defined]
    mz.save_weights(model, tmp_path / "w")
    mz.load_weights(model, tmp_path / "w")


def test_a_file_of_weights_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "w.safetensors", tmp_path / "folder"
    mz.save_weights(gpt(1), file)
    before = file.read_bytes()
    folder.mkdir()
    for path in (folder, tmp_path / "nowhere" / "w"):
        with pytest.raises(mz.CheckpointError, match=r"save_weights: .* cannot be written"):
            mz.save_weights(gpt(2), path)

    def half(arrays: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(weights, "save_file", half)
    with pytest.raises(mz.CheckpointError, match="the disk is full"):
        mz.save_weights(gpt(2), file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", file.name] and file.read_bytes() == before


def test_two_parameters_of_one_name_are_refused_before_one_of_them_is_lost() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.again = {"0": nn.Linear(2, 2), 0: nn.Linear(2, 2)}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"two parameters are called again\.0\.weight"):
        mz.Zero1(model, mz.Adam())
    with pytest.raises(ValueError, match=r"two parameters are called again\.0\.weight"):
        model(np.ones((1, 2), "float32"))
