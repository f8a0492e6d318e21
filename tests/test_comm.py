"""The ring and the messages under it: right to the last bit and byte, or refused."""

import pytest

from launch import run_ranks


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_the_ring_gives_the_documented_sums_and_costs_what_it_says(n: int) -> None:
    large = ["large"] if n in (2, 4) else []  # with messages of 16 MiB
    done = run_ranks(n, "tests/jobs/comm_ring.py", *large, timeout=240)
    assert done.stdout.count("done") == n, done.stdout
    assert not done.stderr, done.stderr
