"""Who holds what, and for how long? Weak references and tracemalloc say so, on every rank, without garbage collection.

Host memory is what they see, so all jobs here run on NumPy.
"""

import re
from typing import Any

import pytest

from launch import ROOT, Done, run_ranks

JOBS = ROOT / "tests" / "jobs"
CLAIMS = re.findall(r"^def (\w+_\w+)\(\) -> None:", (JOBS / "lifetime_vectors.py").read_text(), re.MULTILINE)


def job(n: int, name: str, *args: str, **options: Any) -> Done:
    return run_ranks(n, JOBS / name, *args, env={"MINIZERO_BACKEND": "numpy"}, **options)


@pytest.fixture(scope="module")
def vectors() -> Done:
    """One job makes all claims about vectors, one after another, and ends with the first that fails."""
    return job(3, "lifetime_vectors.py", check=False)


@pytest.mark.parametrize("claim", CLAIMS)
def test_vectors(vectors: Done, claim: str) -> None:
    assert f"ok {claim}\n" in vectors.stdout, vectors.stdout + vectors.stderr


def test_there_are_claims_about_vectors() -> None:
    assert len(CLAIMS) == 14


@pytest.mark.parametrize(("n", "engines"), [(3, 36), (8, 12)])
def test_ranks_hold_the_bytes_of_the_table_and_memory_says_so(n: int, engines: int) -> None:
    """By formula, by `engine.memory()` and by the buffers that are alive; both dtypes, master copy on and off."""
    assert job(n, "lifetime_memory.py").stdout == f"{engines} engines hold what the table says\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrapping_under_zero3_never_needs_more_than_its_chunks_and_one_unit(dtype: str) -> None:
    late, early = (job(3, "lifetime_build.py", dtype, when).stdout.split() for when in ("late", "early"))
    peak, bound, everything = map(int, late[1::2])
    assert peak < bound < everything
    assert int(early[1]) > everything, "drawing everything first was not seen"


def test_live_memory_is_flat_over_100_steps_without_garbage_collection_also_when_losses_are_kept() -> None:
    done = job(2, "lifetime_steady.py")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["DataParallel", "Zero3"]


def test_no_bit_changes_when_all_memory_is_nan_until_it_is_written() -> None:
    assert job(5, "lifetime_poison.py").stdout == "nothing read what nobody wrote\n"
