"""Memory, measured by the allocator: what is held, what is refused, and what the refusal means."""

import gc
import json
import re
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minizero as mz
from launch import run_ranks
from minizero import allocator, memory, nn, optim, plan
from minizero import functional as F
from minizero.backend import xp
from minizero.diagnosis import Diagnosis, OutOfMemory, diagnose

JOBS = Path(__file__).parent / "jobs"


def train(engine: mz.Engine, rows: int = 4) -> None:
    x = np.ones((rows, 64), np.float32)
    engine.backward(F.cross_entropy(engine(x), np.arange(rows) % 8))
    engine.step()


def deep(layers: int = 8, width: int = 64) -> nn.Module:
    return nn.MLP([64, *[width] * layers, 8], dtype="bfloat16")


@pytest.fixture(autouse=True)
def _no_scratch() -> None:
    """What other tests have made and is used by whoever comes: it counts as soon as something is measured."""
    for thing in gc.get_objects():
        if type(thing) is optim.Scratch:
            thing.arrays.clear()


# The allocator.


def test_every_array_counts_and_no_python_object_does() -> None:
    older = xp.ones(10**6)
    with memory.measure() as seen:
        assert seen.live() == 0, "arrays of nobody, from before"
        arrays = [xp.ones(1000), xp.zeros(500, np.float32), xp.ones(10)[3:], xp.array([1.5]), xp.ones(7).astype("int8")]
        bytes_of_arrays = 8000 + 2000 + 80 + 8 + 7
        objects = [object() for _ in range(10**5)], {i: str(i) for i in range(10**4)}, bytearray(10**6)
        assert seen.live() == bytes_of_arrays == seen.terms()["other"]
        del older
        arrays.pop(0)
        assert seen.live() == bytes_of_arrays - 8000
        arrays.clear()
        assert seen.live() == 0
    del objects


@pytest.mark.numpy
def test_nothing_is_measured_outside() -> None:
    def handler() -> str:
        return str(np._core.multiarray.get_handler_name())  # type: ignore[attr-defined]

    with memory.measure():
        assert handler() == "minizero" and tracemalloc.is_tracing()
        kept = np.ones(1000)
    assert handler() == "default_allocator" and not tracemalloc.is_tracing() and not allocator.watch().listeners
    kept.resize(2000, refcheck=False)  # its memory came from the measured time, and lives on
    assert kept[999] == 1
    with memory.measure(existing=False) as seen:
        grown = np.zeros(100)
        grown.resize(5000, refcheck=False)
        assert seen.live() == 40000


def test_meters_can_be_nested_and_end_with_an_exception() -> None:
    with memory.measure() as outer, memory.budget("1 MB"):
        with pytest.raises(ZeroDivisionError), memory.measure() as inner:
            array = xp.ones(1000)
            assert inner.live() == outer.live() == array.nbytes
            _ = 1 / 0
        assert outer.live() == 8000
    assert not allocator.watch().listeners and not tracemalloc.is_tracing()


@pytest.mark.numpy
def test_one_who_traces_already_is_told_so() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeError, match=r"tracemalloc\.stop"), memory.measure():
            pass
    finally:
        tracemalloc.stop()
    with memory.measure(existing=False) as seen:  # and it works again
        assert seen.live() == 0


def test_a_second_engine_is_not_counted_where_only_the_first_is_named() -> None:
    one, two = (mz.DataParallel(deep(), mz.Adam()) for _ in range(2))
    with memory.measure(one) as seen:
        assert seen.live() - seen.terms()["temporary"] == one.memory()["weights"] == seen.terms()["weights"]
        train(two)
        assert seen.terms()["weights"] == one.memory()["weights"] and seen.terms()["optimizer"] >= 0
    with memory.measure() as seen:
        assert seen.terms()["weights"] == one.memory()["weights"] + two.memory()["weights"]
    with memory.measure(existing=False) as seen:
        assert seen.terms()["weights"] == 0


def test_the_peak_is_the_largest_phase_and_never_their_sum() -> None:
    engine = mz.Zero2(deep(), mz.Adam())
    with memory.measure(engine) as seen:
        train(engine)
    totals = {phase: sum(terms.values()) for phase, terms in seen.peaks.items()}
    assert set(totals) >= {"forward", "backward", "step"} and sum(seen.peak.values()) == max(totals.values())
    assert seen.peaks["forward"]["gradients"] == 0, "they do not exist yet"
    assert seen.peaks["step"]["activations"] <= 100, "they exist no more"


def test_memory_measured_on_eight_ranks() -> None:
    done = run_ranks(8, "tests/jobs/memory_measure.py", timeout=300)
    report = json.loads(done.stdout)
    assert len(report) == 3 and all(len(each["peaks"]) == 4 for each in report.values()), report


def test_a_hundred_steps_leave_not_a_byte_alive() -> None:
    report = json.loads(run_ranks(3, "tests/jobs/memory_measure.py", "flat", timeout=120).stdout)
    assert len(report) == 4 and all(report.values()), report


# Budgets.


def test_the_allocation_that_crosses_the_line_is_refused() -> None:
    with pytest.raises(OutOfMemory) as caught, memory.budget("1 MB"):
        first = xp.ones(100_000)
        crossing = xp.ones(100_000)
        pytest.fail(f"not refused: {first.nbytes + crossing.nbytes}")
    error = caught.value
    assert (error.limit, error.asked, error.held["other"]) == (10**6, 800_000, 800_000)
    assert error.phase == "outside" and error.stage == "" and error.sizes is None
    assert isinstance(error, MemoryError) and "800,000 bytes more" in str(error)
    assert "No engine" in str(diagnose(error))


@pytest.mark.parametrize(("limit", "nbytes"), [("8 MB", 8_000_000), ("8 MiB", 8 << 20), (9_999_999, 9_999_999)])
def test_a_budget_is_exact_to_the_byte(limit: str | int, nbytes: int) -> None:
    with memory.measure(existing=False) as seen:
        reused = seen.live()  # scratch of this process, which any engine may use
    more = nbytes - reused
    if more < 0:
        pytest.fail("choose a larger limit")
    with memory.budget(limit, existing=False):
        xp.zeros(more, np.uint8)
    with pytest.raises(OutOfMemory), memory.budget(limit, existing=False):
        xp.zeros(more + 1, np.uint8)


def test_a_real_memory_error_of_another_kind_passes_through() -> None:
    with pytest.raises(MemoryError) as caught, memory.budget("1 GB"):
        raise MemoryError("mine")
    assert not isinstance(caught.value, OutOfMemory)


def test_bad_budgets_are_refused() -> None:
    for bad in ("40 MX", "", "-1 MB", "forty", 0, -5, None, 1.5, float("nan"), "9" * 400):
        with pytest.raises(ValueError, match=r"bytes|MB"):
            memory.budget(bad)  # type: ignore[arg-type]


def test_no_update_is_torn_whichever_allocation_fails() -> None:
    done = subprocess.run([sys.executable, JOBS / "memory_torn.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.replace("'", '"'))
    assert min(counts.values()) > 50, counts


@pytest.mark.parametrize("n", [3, 8])
def test_all_ranks_that_fail_alike_raise_and_go_on_with_the_same_bits(n: int) -> None:
    done = run_ranks(n, "tests/jobs/memory_budget.py", timeout=120)
    stages = ("DataParallel", "Zero1", "Zero2", "Zero3")
    for claim in (*(f"{stage} {phase}" for stage in stages for phase in ("building", "forward", "backward")),):
        assert claim in done.stdout, done.stdout
    assert "DataParallel step" in done.stdout


def test_where_only_one_rank_fails_the_job_ends_with_one_report() -> None:
    start = time.monotonic()
    done = run_ranks(3, "tests/jobs/memory_budget.py", "some", check=False, timeout=30)
    assert done.returncode != 0 and time.monotonic() - start < 15
    output = done.stdout + done.stderr
    assert output.count("bytes more for") == 1 and "Only ranks [1] ran out of memory" in output, output
    assert "Traceback" not in output, output


@pytest.mark.numpy
def test_growing_an_array_is_refused_as_well() -> None:
    with pytest.raises(OutOfMemory), memory.budget("1 MB", existing=False):
        array = np.zeros(10_000)
        array.resize(200_000, refcheck=False)


def test_an_error_that_is_kept_keeps_no_array_alive() -> None:
    seen: list[weakref.ref[Any]] = []

    def work() -> None:
        activation = xp.ones(1000)
        seen.append(weakref.ref(activation))
        xp.ones(10**7)

    with pytest.raises(OutOfMemory) as caught, memory.budget("1 MB"):
        work()
    assert caught.value.asked == 8 * 10**7 and seen[0]() is None, "its traceback holds what did not fit"


def test_what_was_refused_is_not_held() -> None:
    with memory.measure(existing=False) as outer, memory.budget("100 kB", existing=False):
        with pytest.raises(MemoryError):
            xp.ones(10**5)
        array = xp.ones(1000)  # there is room for this one
        assert outer.live() == array.nbytes == sum(outer.terms().values())


def test_a_refusal_that_was_handled_does_not_take_the_place_of_another_error() -> None:
    with pytest.raises(MemoryError) as caught, memory.budget("100 kB", existing=False) as device:
        with pytest.raises(MemoryError):
            xp.ones(10**5)
        raise MemoryError("mine")
    assert not isinstance(caught.value, OutOfMemory)
    with device:  # and used again, it starts anew
        assert device.refused is None


def test_odd_objects_in_the_process_do_not_disturb() -> None:
    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"do not ask for {name}")

    odd, gone = Odd(), weakref.proxy(Odd())
    with memory.measure(existing=False) as seen:
        assert seen.live() == 0
    del odd, gone


def test_what_an_outer_meter_ignores_an_inner_one_ignores() -> None:
    engine = mz.DataParallel(deep(), mz.Adam())
    with memory.measure(existing=False), memory.measure(engine) as inner:
        train(engine)
        assert all(size >= 0 for size in inner.terms().values()), inner.terms()


def test_one_thread_measures_at_a_time() -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            with memory.budget("1 MB"):
                pass
        except RuntimeError as error:
            found.append(error)

    with memory.measure():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1 and "another thread" in str(found[0])


def test_an_exception_inside_the_measuring_comes_out_of_the_block() -> None:
    def listener(size: int, frame: Any) -> bool:
        raise KeyboardInterrupt

    watch = allocator.watch()
    watch.listen(listener)
    with pytest.raises(MemoryError):
        xp.ones(10)
    with pytest.raises(KeyboardInterrupt):
        watch.leave(listener)
    with memory.measure() as seen:
        before, array = seen.live(), xp.ones(10)
        assert seen.live() - before == array.nbytes, "and it goes on as before"


# Diagnoses.


def fail(make: Callable[[], mz.Engine], limit: int, steps: int = 3, rows: int = 4) -> OutOfMemory:
    """What a real training under a budget ends in."""
    with pytest.raises(OutOfMemory) as caught, memory.budget(limit, existing=False):
        engine = make()
        for _ in range(steps):
            train(engine, rows)
        pytest.fail("it fitted")
    return caught.value


def on(error: OutOfMemory, ranks: int) -> OutOfMemory:
    """The same as if so many ranks had been there."""
    error.ranks = ranks
    return error


def check(found: Diagnosis, illness: str) -> None:
    text = str(found)
    assert found.illness == illness, text
    assert illness in text and plan.format_bytes(found.error.limit) in text, text
    for stage, nbytes in found.figures.items():
        assert f"{stage:8}{plan.format_bytes(nbytes):>10}" in text, text
    if found.stage and found.micro_batches == found.split == 1 and not found.ranks and illness != "one unit":
        assert found.figures[found.stage] <= found.error.limit, "recommended, though it does not fit"


def test_redundant_state_is_told_from_the_first_stage_that_fits() -> None:
    big = lambda: mz.DataParallel(deep(16, 256), mz.Adam())  # noqa: E731
    error = on(fail(big, 7_000_000), 8)
    assert error.phase == "step" and error.steps == 0 and error.term == "optimizer", error
    found = diagnose(error)
    check(found, "redundant state")
    assert found.stage == "ZeRO-1" and found.figures["DP"] > 7_000_000


def test_activations_are_told_and_cut_until_they_fit() -> None:
    error = on(fail(lambda: mz.Zero3(deep(16, 256), mz.Adam()), 25_000_000, rows=2000), 8)
    assert error.phase == "forward" and error.term == "activations", error
    found = diagnose(error)
    check(found, "activations")
    assert found.micro_batches in (2, 4) and min(found.figures.values()) > error.limit


def test_the_estimate_follows_how_far_the_forward_came() -> None:
    """A relu belongs to no unit: what has run is seen by the graph behind it."""
    error = on(fail(lambda: mz.Zero3(deep(16, 256), mz.Adam()), 20_000_000, rows=2000), 8)
    assert error.phase == "forward" and 0 < error.reached < 17, vars(error)
    truth, found = 16 * 2000 * 256 * 4, diagnose(error).activations
    assert 0.8 < found / truth < 1.4, f"{found} bytes estimated, where a forward leaves {truth}"


def test_no_batch_is_cut_in_more_parts_than_it_has_rows() -> None:
    error = on(fail(lambda: mz.Zero3(deep(16, 256), mz.Adam()), 25_000_000, rows=2000), 8)
    error.limit, error.rows = 3_400_000, 2000
    parts = diagnose(error).micro_batches
    assert parts > 4
    error.rows = parts - 1
    assert not diagnose(error).cure, "it would need more parts than there are rows"


def test_a_unit_too_wide_is_told_and_split() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            self.into = nn.Linear(64, 4096, dtype="bfloat16")
            self.wide = nn.Linear(4096, 512, dtype="bfloat16")

        def forward(self, x: Any) -> mz.Tensor:
            return self.wide(self.into(x))

    found = diagnose(on(fail(lambda: mz.Zero3(Wide(), mz.SGD(0.1)), 8_000_000), 8))
    check(found, "one unit")
    assert found.split > 1 and "tensor parallelism" in found.cure and "wide" in found.why
    # "even if nothing else is held" is a prediction without anything to spare: the vector, its float32 gradient and
    # the local vector, 2 + 4 + 2 bytes, and blocks of scratch
    taken = re.search(r"they take ([\d.]+) MB even", found.why)
    assert taken and 8 * 4096 * 512 < 1e6 * float(taken[1]) < 8.4 * 4096 * 512, found.why


def test_what_cannot_be_predicted_is_not_guessed() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            self.one, self.two = nn.Linear(64, 512, dtype="bfloat16"), nn.Linear(512, 512)

        def forward(self, x: Any) -> mz.Tensor:
            return self.two(self.one(x))

    found = diagnose(fail(lambda: mz.Zero3(Mixed(), mz.Adam()), 2_000_000))
    assert found.illness == "unknown" and not found.cure and "several dtypes" in str(found)


def test_where_nothing_fits_it_says_so() -> None:
    found = diagnose(on(fail(lambda: mz.DataParallel(deep(16, 256), mz.Adam()), 300_000), 8))
    assert not found.stage and "none" in str(found), str(found)
