"""A stage of one's own, as the README shows it."""

import pytest

from launch import run_ranks


@pytest.mark.parametrize("n", [1, 3, 5])
def test_the_readmes_parameter_server_has_the_bits_of_dp_and_moments_on_rank_0_alone(n: int) -> None:
    run_ranks(n, "tests/jobs/own_stage.py")
