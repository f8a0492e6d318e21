"""minizero on a GPU, as far as a machine without one can tell: on the stand-in in tests/strict, and by detection alone.

What is refused there, a real GPU refuses, too, or answers with wrong numbers. on_strict.py runs the whole suite on it.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any

import pytest

from launch import AWARE, ROOT, STRICT, run_python, run_ranks
from minizero import transport
from test_proof import expected

JOBS = ROOT / "tests" / "jobs"
UNITS = ("functional", "autograd", "nn", "optim", "flat", "engine")  # tests that need no ranks ...
LONG = "not hundred_steps and not kept_loss and not GPT"  # ... and are quick, even there


@pytest.mark.parametrize("ways", [STRICT, AWARE], ids=["staged", "direct"])
def test_a_step_asks_for_one_number_and_messages_of_all_sizes_arrive_on_the_right_devices(ways: dict[str, str]) -> None:
    done = run_ranks(5, JOBS / "strict_step.py", env={**ways, "STRICT_DEVICES": "3"})
    assert done.stdout == "all well\n" and not done.stderr


FAULTS = [
    ("implicit conversion", STRICT, "Implicit conversion to a NumPy array is not allowed"),
    ("host array assigned", STRICT, "non-scalar numpy.ndarray cannot be used"),
    ("host array added", STRICT, "Unsupported type <class 'numpy.ndarray'>"),
    ("a name", STRICT, "CuPy has no cupy.unstack"),
    ("a keyword", STRICT, "has no keyword where"),
    ("unsynchronised", AWARE, "orders were not waited for"),
    ("unsynchronised receiving", AWARE, "orders were not waited for"),
    ("unsynchronised staging", STRICT, "pinned memory that a copy still reads or writes"),
    ("not CUDA-aware", {**STRICT, "MINIZERO_MPI_CUDA": "1"}, "not CUDA-aware: a segmentation fault"),
    ("an empty slice", STRICT, "has no identity"),
    ("an element twice", STRICT, "an element was assigned to twice"),
    ("a hidden wait", STRICT, "waits for a value of the device"),
    ("device too late", STRICT, "array of device"),
]


@pytest.mark.parametrize(("fault", "env", "words"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_planted_fault_is_caught(fault: str, env: dict[str, str], words: str) -> None:
    done = run_ranks(2, JOBS / "strict_faults.py", fault, env=env, check=False, timeout=60)
    assert done.returncode and words in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("env", [STRICT, AWARE], ids=["staged", "direct"])
def test_without_a_fault_nothing_is_caught(env: dict[str, str]) -> None:
    done = run_ranks(2, JOBS / "strict_faults.py", "none", env=env)
    assert done.stdout.count("loss ") == 2 and not done.stderr


def test_rank_0_says_once_that_messages_are_staged_unless_that_was_wanted() -> None:
    env = {key: value for key, value in STRICT.items() if key != transport.FORCE}
    done = run_ranks(2, JOBS / "strict_faults.py", "none", env={**env, transport.FORCE: ""})
    assert done.stderr.count("minizero:") == 1 and "set MINIZERO_MPI_CUDA=1" in done.stderr, done.stderr
    alone = run_python(JOBS / "strict_faults.py", "none", env={**env, transport.FORCE: ""})
    assert not alone.stderr, "alone, there are no messages"


@pytest.mark.numpy  # elsewhere, the whole suite runs on the stand-in itself
@pytest.mark.parametrize(("n", "part"), [(3, "gpt"), (5, "float32")])
def test_on_the_stand_in_every_weight_and_moment_of_every_stage_is_the_truth(n: int, part: str) -> None:
    done = run_ranks(n, JOBS / "proof.py", part, env=STRICT, timeout=400)
    assert json.loads(done.stdout) == expected(n, part)


@pytest.mark.numpy
def test_what_needs_no_ranks_passes_on_the_stand_in() -> None:
    files = [f"tests/test_{name}.py" for name in UNITS]
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LONG, *files, env=STRICT, timeout=400)
    assert " passed" in done.stdout and "failed" not in done.stdout, done.stdout


# Is MPI CUDA-aware? No MPI here is, so each answer is played.


def answers(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[str]:
    """Let MPI and the environment answer; returns the list of the questions that were asked."""
    asked: list[str] = []

    def library() -> Any:
        def query() -> int:
            asked.append("query")
            return int(given.get("query", 0))

        def gpu_query(kind: int, found: Any) -> int:
            asked.append("gpu_query")
            assert kind == 0, "MPIX_GPU_SUPPORT_CUDA"
            ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = int(given.get("gpu_query", 0))
            return int(given.get("code", 0))

        library = type("Library", (), {})()
        for name, function in {"MPIX_Query_cuda_support": query, "MPIX_GPU_query_support": gpu_query}.items():
            if name not in given.get("lacks", ()):
                setattr(library, name, function)
        return library

    class World:
        @staticmethod
        def Get_info() -> Any:  # noqa: N802
            asked.append("kinds")
            return type("Info", (), {"get": lambda self, key: given.get("kinds"), "Free": lambda self: None})()

    mpi = type("MPI", (), {"COMM_WORLD": World, "SUCCESS": 0, "Exception": transport.MPI.Exception})
    monkeypatch.setattr(transport, "MPI", mpi)
    monkeypatch.setattr(transport, "_library", library)
    for name, value in {transport.FORCE: given.get("force"), "MPICH_GPU_SUPPORT_ENABLED": given.get("cray")}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    return asked


@pytest.mark.parametrize(
    ("given", "aware", "why", "asked"),
    [
        ({"force": "1"}, True, "MINIZERO_MPI_CUDA=1", []),
        ({"force": "0", "query": 1, "cray": "1"}, False, "MINIZERO_MPI_CUDA=0", []),
        ({"query": 1}, True, "MPIX_Query_cuda_support", ["query"]),
        ({"gpu_query": 1}, True, "MPIX_GPU_query_support", ["query", "gpu_query"]),
        ({"gpu_query": 1, "code": 15}, False, "none of", ["query", "gpu_query", "kinds"]),
        ({"gpu_query": 1, "lacks": ["MPIX_Query_cuda_support"]}, True, "MPIX_GPU_query_support", ["gpu_query"]),
        ({"kinds": "mpi,system,cuda:device"}, True, "mpi_memory_alloc_kinds", ["query", "gpu_query", "kinds"]),
        ({"kinds": "mpi, cuda"}, True, "mpi_memory_alloc_kinds", ["query", "gpu_query", "kinds"]),
        ({"kinds": "mpi,system"}, False, "none of", ["query", "gpu_query", "kinds"]),
        ({"kinds": "mpi,nocuda"}, False, "none of", ["query", "gpu_query", "kinds"]),
        ({"cray": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED", ["query", "gpu_query", "kinds"]),
        ({"cray": "0"}, False, "none of", ["query", "gpu_query", "kinds"]),
        ({"lacks": ["MPIX_Query_cuda_support", "MPIX_GPU_query_support"]}, False, "none of", ["kinds"]),
    ],
)
def test_who_says_first_that_mpi_is_cuda_aware_is_believed_and_nobody_means_no(
    given: dict[str, Any], aware: bool, why: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(monkeypatch, **given)
    says, reason = transport.cuda_aware.__wrapped__()
    assert says == aware and (reason == why or (why == "none of" and reason.startswith(why))), reason
    assert found == asked


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, force="yes")
    with pytest.raises(ValueError, match="MINIZERO_MPI_CUDA='yes'"):
        transport.cuda_aware.__wrapped__()


def test_the_mpi_that_is_loaded_is_asked_and_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the wheels, none is CUDA-aware. But the questions reach the library, which CDLL(None) cannot see."""
    for name in (transport.FORCE, "MPICH_GPU_SUPPORT_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    library = transport._library()
    known = [name for name in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support") if hasattr(library, name)]
    assert known, "neither question is known to this library"
    assert all(question() in (False, True) for question in transport.QUESTIONS.values())


def test_the_stand_in_is_a_test_double_that_the_package_knows_nothing_of() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "minizero").glob("*.py")]
    assert len(texts) > 20 and not any(re.search("STRICT_|tests/|stand-in|double", text) for text in texts)
    assert sys.modules.get("cupy") is None or "strict" in str(sys.modules["cupy"].__file__)
