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
    for item in items:
        if backend.name == "cupy" and item.get_closest_marker("numpy"):
            item.add_marker(pytest.mark.skip(reason="about NumPy itself"))
            not_run.append(item.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if backend.name == "numpy":
        terminalreporter.write_line("GPU: none here; not run: `make gpu-check` on CuPy. Its stand-in took its place")
    elif not_run:
        terminalreporter.write_line(f"{backend.name}: not run, as about NumPy itself: {', '.join(not_run)}")
