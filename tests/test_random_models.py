"""Do all stages train alike whatever model they are given? Hypothesis looks for one that they do not.

    pytest tests/test_random_models.py                              200 examples, other ones each time
    pytest tests/test_random_models.py --hypothesis-seed=123        those that failed: the seed stands in the failure
    MINIZERO_EXAMPLES=3000 pytest tests/test_random_models.py       more of them

An example is a tree of modules (of odd shapes, shared, frozen, in part or all, unused, used at times, empty, of mixed
dtypes), an optimizer, 1 to 8 ranks, and steps of micro-batches of random sizes. jobs/random_models.py trains it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from launch import BIN, OPEN_MPI, ROOT, _kill, python_path

RANKS, BATCH = 8, 10
JOB = "tests/jobs/random_models.py"
EXAMPLES = max(200, int(os.environ.get("MINIZERO_EXAMPLES", 0)))
TIMEOUT = 60.0  # seconds for one example; a tenth of a second is usual
Spec = dict[str, Any]

# What is drawn. Simple things first: hypothesis shrinks towards them.

sizes = st.sampled_from([1, 2, 3, 5, 7, 13, 0])
widths = st.sampled_from([1, 3, 2, 5, 7, 13])
dtypes = st.sampled_from(["float32", "bfloat16", "float64"])
SHAPES = [[1], [], [0], [5], [8, 0], [3, 1, 2]]
shifts = st.sampled_from([None, None, None, [], [1]])
freeze = st.sampled_from([[], [], [], [True], [False, True]])
ranks = st.sampled_from([2, 3, 1, 5, 3, 2, 5, 1, 4, 8, 7, 6])  # the more, the slower
times = st.sampled_from([[], [], [1], [2], [3]])
HOWS = ["list", "attributes", "dict", "tuple", "nested"]
MODES = ["chain", "residual", "twice", "unused", "sometimes"]
LEAVES = [*["linear"] * 2, "plain", "norm", "embedding", *["scale"] * 3, *["dropout", "same", "tied"] * 2]


@st.composite
def modules(draw: st.DrawFn, depth: int, mixed: bool, dtype: str, by_rank: bool) -> Spec:
    """One module, with all below it."""
    kind = draw(st.sampled_from(LEAVES + ["tree"] * (5 * depth)))
    spec: Spec = {"kind": kind, "dtype": draw(dtypes) if mixed else dtype}
    if kind == "tree":
        spec["how"] = draw(st.sampled_from(HOWS))
        spec["mode"] = draw(st.sampled_from([*MODES, *["by rank"] * (5 * by_rank)]))
        spec["children"] = draw(st.lists(modules(depth - 1, mixed, dtype, by_rank), min_size=1, max_size=3))
        spec["shift"] = draw(shifts)
        spec["frozen"] = draw(st.sampled_from([False, False, False, True]))
    elif kind == "linear":
        spec |= {"inputs": draw(sizes), "outputs": draw(sizes), "bias": draw(st.booleans()), "freeze": draw(freeze)}
    elif kind == "norm":
        spec |= {"width": draw(widths), "freeze": draw(freeze)}
    elif kind == "embedding":
        spec |= {"count": draw(widths), "width": draw(widths), "freeze": draw(freeze)}
    elif kind == "scale":
        spec |= {"shapes": draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)), "freeze": draw(freeze)}
    elif kind in ("same", "tied"):
        spec["back"] = draw(st.integers(0, 5))
    return spec


@st.composite
def steps(draw: st.DrawFn, n: int) -> Spec:
    """One step: how many examples each rank has in each micro-batch, and what is done with their gradients."""
    micros = draw(st.sampled_from([1] * 8 + [2, 2, 3, 4]))
    rows = draw(st.sampled_from(["even", "even", "uneven", "uneven", "uneven", "one rank", "one rank", "none"]))
    count = {"even": st.just(2), "uneven": st.integers(0, 3), "one rank": st.just(0), "none": st.just(0)}[rows]
    spec: Spec = {"rows": [[draw(count) for _ in range(micros)] for _ in range(n)]}
    if rows == "one rank":
        spec["rows"][draw(st.integers(0, n - 1))][-1] = 3
    spec["examples"] = draw(st.booleans())
    spec["no_sync"] = [*(draw(st.booleans()) for _ in range(micros - 1)), False]
    spec["clip"] = draw(st.sampled_from([None, 0.05, 1e6, 0.05, 1e6]))
    spec["abandon"] = draw(st.sampled_from([False] * 4 + [True]))
    return spec


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A model, an optimizer, a number of ranks, and steps."""
    n, dtype = draw(ranks), draw(dtypes)
    mixed, by_rank = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    spec: Spec = {"n": n, "dtype": dtype, "seed": draw(st.integers(0, 9999))}
    spec["children"] = draw(st.lists(modules(2, mixed, dtype, by_rank), max_size=4))
    spec |= {"how": draw(st.sampled_from(HOWS)), "shift": draw(shifts), "head": draw(widths), "time": draw(times)}
    spec["units"] = draw(st.sampled_from(["default", "default", "leaves", "reversed", "whole", "none"]))
    spec["own_seeds"] = draw(st.booleans()) and '"dropout"' not in json.dumps(spec)  # whose noise is each rank's own
    spec["optimizer"] = draw(st.sampled_from(["sgd", "momentum", "adam", "adam with decay"]))
    spec["master"], spec["decay"] = draw(st.booleans()), draw(st.sampled_from([1, 0.5]))
    spec["steps"] = [draw(steps(n)) for _ in range(draw(st.sampled_from([2, 2, 2, 2, 3])))]
    return spec


# What an example is an example of. Each of these is drawn in 7 % of all examples at least, most of them far more
# often: that one of them is never among 200 happens less than once in a million runs.


def below(spec: Spec) -> Iterator[Spec]:
    for child in spec["children"]:
        yield child
        if "children" in child:
            yield from below(child)


def features(spec: Spec) -> set[str]:
    """By what stands in the spec; the job adds what it finds in the model."""
    nodes, steps, n = list(below(spec)), spec["steps"], spec["n"]
    found = {f"{n} ranks", spec["optimizer"], spec["dtype"], f"units: {spec['units']}", f"in a {spec['how']}"}
    found |= {node["kind"] for node in nodes} | {node["mode"] for node in nodes if node["kind"] == "tree"}
    found |= {f"shape {shape}" for node in nodes if node["kind"] == "scale" for shape in node["shapes"]}
    found |= {"without bias" for node in nodes if node["kind"] == "linear" and not node["bias"]}
    found |= {"in a tree in a tree" for node in nodes for child in node.get("children", []) if child["kind"] == "tree"}
    found |= {"frozen tree" for node in nodes if node.get("frozen") and node["children"]}
    found |= {"frozen parameter" for node in nodes if any(node.get("freeze", []))}
    found |= {"own parameter" for node in [spec, *nodes] if node.get("shift") is not None}
    found |= {f"{len(step['no_sync'])} micro-batches" for step in steps}
    for name in ("own_seeds", "master"):
        found |= {name} if spec[name] else set()
    found |= {"smaller lr"} if spec["decay"] < 1 else set()
    found |= {"time"} if spec["time"] else set()
    for step in steps:
        counts = {count for row in step["rows"] for count in row}
        found |= {"examples="} if step["examples"] else set()
        found |= {"uneven, examples="} if step["examples"] and len(counts) > 1 else set()
        found |= {"uneven, the same weight"} if not step["examples"] and len(counts) > 1 else set()
        found |= {"an empty slice"} if 0 in counts and len(counts) > 1 else set()
        found |= {"no_sync"} if any(step["no_sync"]) else set()
        found |= {"no_sync at times"} if any(step["no_sync"]) and not all(step["no_sync"][:-1]) else set()
    return found


EVERY = {
    *(f"{n} ranks" for n in range(1, RANKS + 1)), "float32", "bfloat16", "float64", "two dtypes",
    *(f"units: {choice}" for choice in ("default", "leaves", "reversed", "whole", "none")), "root unit", "empty unit",
    "sgd", "momentum", "adam", "adam with decay", "master copy", "smaller lr",
    *LEAVES, "tree", "in a tree in a tree", *MODES, "by rank", *(f"in a {how}" for how in HOWS), "without bias",
    *(f"shape {shape}" for shape in SHAPES), "empty parameter beside others", "padding", "more ranks than elements",
    "own parameter", "shared parameter", "shared module", "trained without gradient",
    "frozen tree", "frozen parameter", "frozen unit", "module frozen in part", "own_seeds", "time",
    *(f"{count} micro-batches" for count in range(1, 5)), "no_sync", "no_sync at times", "examples=",
    "uneven, examples=", "uneven, the same weight", "an empty slice", "clipped", "within the norm", "moved",
    "a step was taken", "a step was refused", "a step was abandoned",
}  # fmt: skip


# The job, and the search.


class Job:
    """jobs/random_models.py on all ranks, started when it is asked for the first time, and again after a failure."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.timeout = TIMEOUT

    def start(self) -> subprocess.Popen[bytes]:
        launcher = shutil.which("mpiexec", path=BIN) or shutil.which("mpiexec")
        assert launcher, f"no mpiexec beside {sys.executable} and none on PATH"
        path = os.pathsep.join([BIN, os.environ.get("PATH", os.defpath)])
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would fill up
        self.process = subprocess.Popen(
            [launcher, "-n", str(RANKS), sys.executable, JOB],
            cwd=ROOT, env={**os.environ, **OPEN_MPI, "PATH": path, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[bytes] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True)
        self.reader.start()
        return self.process

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    def ask(self, spec: Spec) -> dict[str, Any]:
        """The verdict on one example."""
        process = self.process or self.start()
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # said by what it wrote to stderr
            process.stdin.write(json.dumps(spec).encode() + b"\n")
            process.stdin.flush()
        said, ended = [b""], ""
        while not ended and not said[-1].startswith(b"{"):  # a launcher may have something to say, too
            try:
                said.append(self.lines.get(timeout=self.timeout))
                ended = "" if said[-1] else "the job has ended"
            except queue.Empty:
                ended = f"no verdict for {self.timeout:g} s"
                self.timeout = TIMEOUT / 4  # while a simpler example is looked for
        if ended:
            text = f"{ended}\n{b''.join(said).decode(errors='replace')}{self.stop()}\n"
            return {"equal": False, "where": "", "error": text, "facts": []}
        verdict: dict[str, Any] = json.loads(said[-1])
        if verdict["error"]:
            self.stop()  # the ranks may have drifted apart
        return verdict

    def stop(self) -> str:
        """End the job; the end of what it wrote to stderr."""
        if self.process is None:
            return ""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        _kill(self.process)
        self.reader.join()
        self.process.stdout.close()
        self.process = None
        with self.errors:
            self.errors.seek(0)
            return "\n".join(self.errors.read().decode(errors="replace").splitlines()[-60:])


class Outcome(NamedTuple):
    seen: Counter[str]  # examples of each feature
    failure: str  # empty: there is none


def search(start: int) -> Outcome:
    """Draw examples from seed `start`, `start` + 1, ... until one fails; make that as simple as it can be.

    BATCH examples come from each seed. After so many, hypothesis would draw variations of what it has drawn, and 200
    in a row would be some 30 and their kin. Like this they are independent; and a failure is soon found again.
    """
    job, seen, passed, failures = Job(), Counter[str](), set[str](), list[str]()

    @settings(max_examples=BATCH, derandomize=False, deadline=None, print_blob=True, report_multiple_bugs=False,
              phases=(Phase.reuse, Phase.generate, Phase.shrink))  # fmt: skip
    @given(specs())
    def all_stages_have_the_bits_of_the_truth(spec: Spec) -> None:
        line = json.dumps(spec)
        if line in passed:  # the simplest example comes from every seed
            return
        verdict = job.ask(spec)
        seen.update({*features(spec), *verdict["facts"]})
        if verdict["equal"]:
            passed.add(line)
            return
        failures.append(f"{verdict['where']}{verdict['error']}mpirun -n {RANKS} python {JOB} <<< '{line}'")
        raise AssertionError(failures[-1])

    number = start
    try:
        while len(passed) < EXAMPLES:
            seed(number)(all_stages_have_the_bits_of_the_truth)()
            number += 1
    except Exception as error:
        again = f"pytest tests/{Path(__file__).name} --hypothesis-seed={number}"
        text = [f"found after {len(passed)} others; again: {again}", str(error), *getattr(error, "__notes__", [])]
        return Outcome(seen, "\n".join([*text, "As it was first found:", *failures[:1]]))
    finally:
        job.stop()
    return Outcome(seen + Counter(examples=len(passed)), "")


@pytest.fixture(scope="module")
def outcome(pytestconfig: pytest.Config) -> Outcome:
    wanted = str(pytestconfig.getoption("--hypothesis-seed") or "")
    return search(int(wanted) if wanted.isdigit() else random.SystemRandom().randrange(2**32))


def test_all_stages_have_the_bits_of_the_truth_whatever_the_model(outcome: Outcome) -> None:
    assert not outcome.failure, outcome.failure
    assert outcome.seen["examples"] >= EXAMPLES


def test_the_drawn_models_have_every_feature(outcome: Outcome) -> None:
    ended = "; the search has ended early" if outcome.failure else ""
    assert set(outcome.seen) >= EVERY, f"never drawn: {sorted(EVERY - set(outcome.seen))}{ended}"
