"""The engine's plumbing: refusals, exceptions and odd orders of calls, alike in every stage."""

import copy

import numpy as np
import pytest

from launch import run_ranks
from minizero import nn


@pytest.mark.parametrize("n", [3, 5])
def test_the_engine_keeps_its_word_off_the_straight_road(n: int) -> None:
    done = run_ranks(n, "tests/jobs/engine_plumbing.py")
    assert done.stdout.strip() == "15 claims", done.stdout


def test_a_job_with_a_hundred_communicators_ends() -> None:
    run_ranks(3, "tests/jobs/ranks_many.py", timeout=30)


def test_a_model_can_be_copied() -> None:
    model = nn.MLP([3, 4, 2], seed=1)
    twin = copy.deepcopy(model)
    model.materialise()
    twin.materialise()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a is not b and (a.numpy().view(np.uint32) == b.numpy().view(np.uint32)).all(), name
