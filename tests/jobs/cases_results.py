"""How do many cases share one MPI job per number of ranks, and each still is a test that fails alone?

    case = Cases("cases_training.py")

    @case(3, 5)                                # run the job's function of this name at 3 and at 5 ranks
    def test_a_layer_learns(facts: list[Facts]) -> None:
        assert agreed(facts) == {...}          # what every rank found

The job appends what each case found to a file, so a job that breaks takes only the cases with it that it had left.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import run_ranks

JOBS = Path(__file__).parent
Facts = dict[str, Any]  # what a case found on one rank
Test = Callable[..., None]


class Cases:
    """The cases of one job script, by the numbers of ranks that tests ask for."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.names: dict[int, list[str]] = {}
        self._found: dict[int, tuple[dict[str, list[Facts]], str]] = {}

    def __call__(self, *counts: int) -> Callable[[Test], Test]:
        """Plan the case that has the test's name, at so many ranks."""

        def plan(test: Test) -> Test:
            for n in counts:
                self.names.setdefault(n, []).append(test.__name__.removeprefix("test_"))
            return pytest.mark.parametrize("n", counts)(test)

        return plan

    def facts(self, n: int, test: str) -> list[Facts]:
        """What a test's case found on each of n ranks. The first call runs all cases that are planned at n."""
        if n not in self._found:
            self._found[n] = self._run(n)
        found, trouble = self._found[n]
        facts = found.get(test.removeprefix("test_"))
        assert facts is not None, f"the job never came to the end of this case: {trouble}"
        errors = [f"rank {rank}: {here['error']}" for rank, here in enumerate(facts) if "error" in here]
        assert not errors, "\n".join(errors)
        return facts

    def _run(self, n: int) -> tuple[dict[str, list[Facts]], str]:
        trouble = ""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found"
            path.touch()
            try:
                run_ranks(n, JOBS / self.script, path, *self.names[n], timeout=200)
            except (AssertionError, TimeoutError) as error:
                trouble = str(error)
            lines = path.read_text().splitlines()
        return {name: facts for name, facts in map(json.loads, lines)}, trouble


def agreed(facts: list[Facts]) -> Facts:
    """What one rank found, where all must have found the same."""
    others = [rank for rank, here in enumerate(facts) if here != facts[0]]
    assert not others, f"ranks {others} found something else than rank 0: {facts}"
    return facts[0]
