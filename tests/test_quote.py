"""Does `lessons/quote.py` fill in what a marker names, and turn red for each way in which a text can rot?"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

RING = '''"""How does a ring add?"""

SIZE = 8


def reduce_scatter(comm, vector):
    """Sum in place."""

    # once around
    return vector


class Ring:
    """A ring."""

    @property
    def size(self):
        """How many ranks."""
        return SIZE

    @size.setter
    def size(self, value):
        raise AttributeError
'''
PROGRAM = """
import sys
print("machine: 8 ranks, NumPy, MPI: MPICH 5.0.2")
print("step 20  loss 2.3026 -> 0.0412  accuracy 97.6 %  in 1.25 s, 12.5 steps/s")
print("weights and moments: 3fa9c2d1e0 3fa9c2d1e0")
print("┃ stage  ┃ predicted ┃ measured ┃")
print("│ ZeRO-2 │      3.25 │     3.25 │")
print("held: 13.5 MB after loss 0.0412")
print("same bits as plain DP: yes")
"""
LESSON = """# A lesson

The sum, in a ring:

<!-- quote: ring.py reduce_scatter -->

and what it prints:

<!-- output: python lessons/program.py -->

That was all.
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quote", ROOT / "lessons" / "quote.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quote = load()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a small repository whose one lesson has been filled in."""
    for folder in ("minizero", "lessons"):
        (tmp_path / folder).mkdir()
    (tmp_path / "minizero" / "ring.py").write_text(RING)
    (tmp_path / "lessons" / "program.py").write_text(PROGRAM)
    (tmp_path / "lessons" / "01_ring.md").write_text(LESSON)
    assert quote.main([], tmp_path) == 0
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def fill(root: Path, marker: str) -> str:
    """Return the block that the script writes below a marker."""
    path = root / "lessons" / "02_new.md"
    path.write_text(marker)
    assert quote.main(["--only", str(path)], root) == 0
    assert quote.main(["--only", str(path), "--check"], root) == 0
    return path.read_text().removeprefix(marker).strip("\n")


def red(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what --check complains of; it must complain, and change nothing."""
    before = {path: path.read_bytes() for path in root.rglob("*.md")}
    capsys.readouterr()
    assert quote.main(["--check", *arguments], root) == 1
    assert before == {path: path.read_bytes() for path in root.rglob("*.md")}
    return capsys.readouterr().out


def test_a_filled_text_is_fresh_and_stays_as_it_is(root: Path) -> None:
    before = (root / "lessons" / "01_ring.md").read_text()
    assert before.startswith(LESSON.partition("and what")[0].rstrip() + "\n```python\ndef reduce_scatter(comm")
    assert "│ ZeRO-2 │      3.25 │     3.25 │\n" in before and before.endswith("```\n\nThat was all.\n")
    assert quote.main(["--check"], root) == 0
    assert quote.main([], root) == 0
    assert (root / "lessons" / "01_ring.md").read_text() == before


def test_a_name_may_be_a_constant_a_class_a_property_or_a_file(root: Path) -> None:
    assert fill(root, "<!-- quote: minizero/ring.py SIZE -->") == "```python\nSIZE = 8\n```"
    assert fill(root, "<!-- quote: ring.py Ring.size nodoc -->").split("\n") == [
        "```python",
        "@property",
        "def size(self):",
        "    return SIZE",
        "",
        "@size.setter",
        "def size(self, value):",
        "    raise AttributeError",
        "```",
    ]
    assert fill(root, "<!-- quote: ring.py -->") == f"```python\n{RING}```"
    assert fill(root, "<!-- quote: ring.py reduce_scatter nodoc -->") == (
        "```python\ndef reduce_scatter(comm, vector):\n    # once around\n    return vector\n```"
    )


def test_a_fence_is_longer_than_any_inside_it(root: Path) -> None:
    (root / "example.md").write_text("```python\n1\n```\n")
    assert fill(root, "<!-- quote: example.md -->") == "````text\n```python\n1\n```\n````"


def test_a_diff_shows_what_one_class_changes_against_another(root: Path) -> None:
    (root / "minizero" / "zero1.py").write_text("class Zero1(DP):\n    def mine(self):\n        return 1\n")
    (root / "minizero" / "zero2.py").write_text("class Zero2(Zero1):\n    def mine(self):\n        return 1\n")
    expected = "```diff\n-class Zero1(DP):\n+class Zero2(Zero1):\n     def mine(self):\n         return 1\n```"
    assert fill(root, "<!-- diff: zero1.py Zero1 zero2.py Zero2 -->") == expected
    assert fill(root, "<!-- diff: zero1.py zero2.py -->") == expected


def test_output_can_be_cut_to_the_lines_between_two(root: Path) -> None:
    marker = '<!-- output: python lessons/program.py from="stage" to="ZeRO-2" -->'
    table = "┃ stage  ┃ predicted ┃ measured ┃\n│ ZeRO-2 │      3.25 │     3.25 │"
    assert fill(root, marker) == f"```text\n{table}\n```"


def test_a_command_runs_once_in_the_root_with_this_python_and_no_colours(root: Path) -> None:
    (root / "once.py").write_text(
        "import os, sys\n"
        "print(sys.prefix, os.environ['NO_COLOR'], os.environ['COLUMNS'])\n"
        "print('x', file=open('count', 'a'))\n"
    )
    path = root / "lessons" / "02_new.md"
    path.write_text("<!-- output: python once.py -->\n" * 3)
    assert quote.main(["--only", str(path)], root) == 0
    assert path.read_text().count(f"{sys.prefix} 1 100\n") == 3
    assert (root / "count").read_text() == "x\n"


def test_a_marker_inside_a_block_is_only_an_example(root: Path) -> None:
    path = root / "README.md"
    path.write_text("````text\n<!-- quote: nowhere.py -->\n```\n````\nIn a line: `<!-- quote: nowhere.py -->`.\n")
    assert quote.main(["--check"], root) == 0


def test_a_changed_function_is_stale_until_rewritten(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(root / "minizero" / "ring.py", "once around", "twice around")
    complaint = red(root, capsys)
    assert "01_ring.md:5: quote: ring.py reduce_scatter: stale" in complaint and "twice around" in complaint
    assert quote.main([], root) == 0
    assert quote.main(["--check"], root) == 0


def test_a_block_edited_by_hand_is_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(root / "lessons" / "01_ring.md", "    return vector\n```", "    return vector\n\n```")
    assert "01_ring.md:5" in red(root, capsys, "--no-run")


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("minizero/ring.py", "def reduce_scatter", "def scatter_reduce", "there is no reduce_scatter in ring.py"),
        ("minizero/ring.py", "def reduce_scatter(", "def reduce_scatter((", "ring.py, line 6"),
        ("lessons/01_ring.md", "ring.py", "rink.py", "rink.py"),
        ("lessons/01_ring.md", "<!-- quote", "<!-- qoute", "a marker is one line"),
        ("lessons/01_ring.md", "scatter -->", "scatter", "a marker is one line"),
        ("lessons/01_ring.md", "scatter -->", "scatter please -->", "like none of the examples"),
        ("lessons/01_ring.md", "-->\n```python", "-->\n\n```python", "a blank line parts"),
        ("lessons/01_ring.md", "```\n\nThat", "\n\nThat", "is never closed"),
        ("lessons/program.py", "import sys", "import sys; sys.exit('no GPU')", "failed with status 1: no GPU"),
        ("lessons/program.py", "import sys", "import sys; sys.exit()", "there is nothing to show"),
    ],
)
def test_what_cannot_be_made_is_named_and_left_alone(
    root: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, complaint: str
) -> None:
    change(root / file, old, new)
    assert complaint in red(root, capsys)
    before = (root / "lessons" / "01_ring.md").read_text()
    assert quote.main([], root) == 1
    assert (root / "lessons" / "01_ring.md").read_text() == before


def test_a_missing_fence_is_red_and_then_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "lessons" / "02_new.md"
    path.write_text("<!-- output: python lessons/program.py -->\n\nText.\n")
    assert "02_new.md:1: output: python lessons/program.py: there is no fenced" in red(root, capsys, "--no-run")
    assert quote.main([], root) == 0
    assert path.read_text().endswith("same bits as plain DP: yes\n```\n\nText.\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("     3.25 │ ", "     3.26 │ "),  # a table
        ("13.5 MB", "13.6 MB"),  # a memory figure beside a loss
        ("yes", "no"),
        ("3fa9c2d1e0 3fa9c2d1e0", "3fa9c2d1e0 3fa9c2d1e1"),  # two ranks that differ
        ("loss 2.3026", "lost 2.3026"),
        ("step 20 ", "step 21 "),
        ("machine: ", ""),
        ('print("same', 'print(); print("same'),
    ],
)
def test_a_changed_figure_in_the_output_is_stale(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    change(root / "lessons" / "program.py", old, new)
    assert "01_ring.md:16: output: python lessons/program.py: stale" in red(root, capsys)
    assert quote.main(["--check", "--no-run"], root) == 0


def test_what_differs_between_machines_may_differ(root: Path) -> None:
    for old, new in (
        ("8 ranks, NumPy, MPI: MPICH 5.0.2", "8 ranks, NumPy, MPI: Open MPI 5.0.11"),
        ("loss 2.3026 -> 0.0412  accuracy", "loss 2.31 -> 0.1  accuracy"),
        ("97.6 %  in 1.25 s, 12.5 steps/s", "100 %  in 12 ms, 9.75 steps/s"),
        ("3fa9c2d1e0 3fa9c2d1e0", "77aa77aa77 77aa77aa77"),
    ):
        change(root / "lessons" / "program.py", old, new)
    assert quote.main(["--check"], root) == 0


@pytest.mark.parametrize(
    "line",
    [
        "held: 13.5 MB, loss 0.1",
        "≈ 12 bytes per parameter, 0.5 s",
        "12MB 1 s",
        "loss 0.1: 2.00 Ψ",
        "│ ZeRO-2 │ 3.25 │ 1e8 │ 1.2345678e+05 │ 12345678 │",
        "same bits after loss 0.1",
        "machine: 139 GiB",
    ],
)
def test_no_memory_or_traffic_figure_is_masked(line: str) -> None:
    assert quote.masked([line]) == [line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step   3  loss  0.25", "step 3 loss #"),
        ("gradient norm: 1.5e-05 → nan", "gradient norm: # → nan"),
        ("│ loss: 0.25 │ 3.25 │ 0.2 ms │", "│ loss: # │ 3.25 │ # │"),
        ("off by ≈ 1.2e-07", "off by ≈ #"),
        ("0:00:12 3.2 GB/s, 3 M tokens/s", "# #, #"),
        ("sample: the ring", "sample:#"),
        ("hash 0a1b2c3d, deadbeef, 20240101", "hash hash 0, deadbeef, 20240101"),
    ],
)
def test_scores_times_labels_and_hashes_are_masked(line: str, expected: str) -> None:
    assert quote.masked([line]) == [expected]
