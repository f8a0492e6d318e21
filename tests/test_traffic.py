"""How many bytes does each rank send? Those of the table, to the byte, by label and as MPI is handed them."""

import sys

import pytest

from launch import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from traffic_table import control, padded, per_step, wire

JOBS = ROOT / "tests" / "jobs"
CASES, STAGES, KINDS = 6 + 3, 4, 3  # six models in float32, three of them in bfloat16 too


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_rank_sends_the_bytes_of_the_table(n: int) -> None:
    """MLP, GPT tied and untied, frozen layers; float32 and bfloat16; 1 and 3 micro-batches; no_sync and not."""
    done = run_ranks(n, JOBS / "traffic_bytes.py")
    assert done.stdout.split("\n")[0] == f"{CASES * STAGES * KINDS} steps counted"


def test_the_table_says_what_the_design_says() -> None:
    """In Ψ(N-1)/N: 2k, 2k + 1, k + 1, 3k; under no_sync 2, 3, 2, 2k + 1."""
    stages = ("DataParallel", "Zero1", "Zero2", "Zero3")
    for k in (1, 3):
        every, local = (
            [sum(per_step(stage, 1, 5, k, no_sync).values()) for stage in stages] for no_sync in (False, True)
        )
        assert every == [2 * k, 2 * k + 1, k + 1, 3 * k]
        assert local == [2, 3, 2, 2 * k + 1]
    assert padded(54, 5) == 55 and padded(55, 5) == 55 and padded(1, 8) == 8
    assert wire([54, 3], 2, 5) == (55 + 5) * 2 * 4 // 5
    assert wire([54, 3], 4, 1) == 0


def test_control_is_a_few_hundred_bytes() -> None:
    assert [control(n, 0, False) for n in (1, 2, 8)] == [0, 40, 280]
    assert control(8, 6, True) == 280 + 8 * 7 * 6
