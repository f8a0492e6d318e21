"""The cases about messages (25-28) and their relatives: one job per number of ranks makes all claims, one by one.

How they are checked, and what the right values are, stands in jobs/cases_messages.py.
"""

import re

import pytest

from launch import ROOT, Done, run_ranks

JOB = ROOT / "tests" / "jobs" / "cases_messages.py"
CLAIMS = re.findall(r"^def (\w+(?:_\w+){4,})\(\) -> None:", JOB.read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, 3, 4])
def job(request: pytest.FixtureRequest) -> Done:
    """It ends with the first claim that does not hold."""
    return run_ranks(request.param, JOB, check=False, timeout=240)


@pytest.mark.parametrize("claim", CLAIMS)
def test_messages(job: Done, claim: str) -> None:
    assert f"ok {claim}\n" in job.stdout, job.stdout + job.stderr


def test_the_job_makes_these_claims_and_ends_well(job: Done) -> None:
    assert job.stdout == "".join(f"ok {claim}\n" for claim in CLAIMS) and len(CLAIMS) == 20
    assert job.returncode == 0, job.stderr
