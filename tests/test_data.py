"""Do N ranks see each example of a step once, and the same ones at any N?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("data", ROOT / "lessons" / "data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = load()


def test_the_digits_are_split_once_and_for_all() -> None:
    train_x, train_y, test_x, test_y = data.digits()
    assert train_x.shape == (1500, 64) and test_x.shape == (297, 64)
    assert train_x.dtype == test_x.dtype == np.float32 and train_y.dtype == test_y.dtype == np.int64
    assert train_x.min() == 0 and train_x.max() == 1
    assert sorted(set(train_y)) == sorted(set(test_y)) == list(range(10))
    everything = np.column_stack([np.concatenate([train_x, test_x]) * 16, np.concatenate([train_y, test_y])])
    shipped = np.loadtxt(ROOT / "lessons" / "digits.csv", delimiter=",")
    assert sorted(map(tuple, everything)) == sorted(map(tuple, shipped))


@given(batch=st.integers(1, 40), size=st.integers(1, 9), step=st.integers(0, 99), seed=st.integers(0, 9))
def test_ranks_together_see_each_example_of_a_step_once(batch: int, size: int, step: int, seed: int) -> None:
    x = np.arange(40)
    whole = data.global_batch(40, batch, step, seed)
    slices = [next(data.batches(x, -x, batch, [step], rank, size, seed)) for rank in range(size)]
    assert len(set(whole)) == batch
    assert np.array_equal(np.concatenate([x for x, _ in slices]), whole)
    assert np.array_equal(np.concatenate([y for _, y in slices]), -whole)
    assert max(len(x) for x, _ in slices) - min(len(x) for x, _ in slices) <= 1


def test_resuming_at_a_step_draws_what_would_have_come() -> None:
    x = np.arange(40)
    through = [batch.tolist() for batch, _ in data.batches(x, x, 8, range(6))]
    assert through[3:] == [batch.tolist() for batch, _ in data.batches(x, x, 8, range(3, 6))]
    assert len({tuple(batch) for batch in through}) == 6


def test_text_is_the_lessons_prose_and_nothing_that_a_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "HERE", tmp_path)
    (tmp_path / "DATA.md").write_text("Z")
    (tmp_path / "01_b.md").write_text("hé", encoding="utf-8")
    (tmp_path / "00_a.md").write_text("ab\n<!-- output: Z -->\n````text\nZ\n```\nZ\n````\ng")
    x, y, vocabulary = data.text(2)
    assert vocabulary == "\nabghé" and x.dtype == y.dtype == np.int64
    assert np.array_equal(x[1:], y[:-1]) and x.shape == y.shape
    assert "".join(vocabulary[token] for token in [*x[:, 0], *y[-1]]) == "ab\n\n\ng\nhé"
    with pytest.raises(ValueError, match="too few for context=99"):
        data.text(99)
