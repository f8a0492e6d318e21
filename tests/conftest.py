"""Settings for the whole suite, and the line that says what this machine could not test."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

from minizero import backend

# Examples are as slow as the machine is busy; a failure prints the blob that replays it anywhere.
settings.register_profile("minizero", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minizero")

not_run: list[str] = []


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if backend.name != "cupy":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU and CuPy"))
                not_run.append(item.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if backend.name != "cupy":
        tests = "".join(f", {name}" for name in not_run)
        terminalreporter.write_line(f"GPU: none here; not run: the suite on CuPy{tests}")
