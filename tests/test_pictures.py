"""The lessons' pictures: what is drawn is what was measured, recording changes nothing, and the files are small."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import minizero as mz
from launch import ROOT, python_path, run_python, run_ranks
from minizero import functional as F
from minizero import memory, nn

LESSONS = ROOT / "lessons"
ZERO1, ZERO3 = "lessons/02_zero1.py", "lessons/04_zero3.py"
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
NO_MATPLOTLIB = "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", LESSONS / "pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load()
X, Y = np.random.default_rng(0).normal(size=(40, 8)).astype("float32"), np.arange(40) % 5


def trained(stage: type[mz.Engine] = mz.Zero2) -> mz.Engine:
    """An engine after its first step, when moments exist."""
    engine = stage(nn.MLP([8, 32, 24, 5], seed=0), mz.Adam(lr=1e-2), mz.Communicator())
    train(engine)
    return engine


def train(engine: mz.Engine, micro_batches: int = 1) -> None:
    for x, y in zip(np.split(X, micro_batches), np.split(Y, micro_batches), strict=True):
        engine.backward(F.cross_entropy(engine(x), y))
    engine.step()


def recorded(engine: mz.Engine, micro_batches: int = 1) -> tuple[Any, memory.measure]:
    """A recorded step, and the same by a measurement around it."""
    steps: list[Any] = []
    with memory.measure(engine, timeline=True) as seen, pictures.recording(engine, steps, "ZeRO-2"):
        train(engine, micro_batches)
    assert len(steps) == 1
    return steps[0], seen


def total(terms: dict[str, int]) -> int:
    return sum(terms.values())


def test_what_is_recorded_is_every_moment_that_measure_saw_and_the_two_ends() -> None:
    engine = trained()
    held = engine.memory()
    step, seen = recorded(engine)
    assert len(seen.events) > 40 and len(step.moments) == len(seen.events) + 2
    assert [terms for _, terms in step.moments[1:-1]] == [terms for _, terms in seen.events]
    for _, terms in (step.moments[0], step.moments[-1]):
        assert {term: terms[term] for term in held} == held and not terms["gradients"]
    assert {phase for phase, _ in step.moments} == {"forward", "backward", "step"}
    for phase in ("forward", "backward", "step"):
        highest = max(total(terms) for name, terms in step.moments if name == phase)
        assert highest == total(seen.peaks[phase]), phase
    assert total(step.largest[1]) == total(seen.peak)


def test_all_terms_of_a_measurement_are_drawn() -> None:
    assert tuple(pictures.STYLES) == memory.TERMS


@pytest.mark.parametrize("most", [1, 7, 32, 10_000])
def test_columns_keep_the_largest_moment_of_each_phase_and_leave_no_gap(most: int) -> None:
    step, _ = recorded(trained(), micro_batches=2)
    assert [phase for phase, _ in step.bands()] == ["forward", "backward", "forward", "backward", "step"]
    columns = step.columns(most)
    assert columns[0].left == 0 and columns[-1].right == 5
    assert all(one.right == two.left for one, two in pairwise(columns))
    for place, (_, moments) in enumerate(step.bands()):
        mine = [column for column in columns if place <= column.left < place + 1]
        assert len(mine) == min(most, len(moments))
        assert max(total(column.terms) for column in mine) == max(map(total, moments))
        assert all(column.terms in moments for column in mine)


def test_the_heights_in_the_picture_are_the_bytes_that_were_held() -> None:
    step, seen = recorded(trained())
    with pictures.drawing():
        figure = pictures.step_figure([step], "a model")
    areas = figure.axes[0].patches  # the highest term first
    terms = [term for term in memory.TERMS if any(held[term] for _, held in step.moments)]
    assert {"weights", "gradients", "optimizer", "activations", "temporary"} <= set(terms)
    assert len(areas) == len(terms)
    for area, term in zip(reversed(areas), terms, strict=True):
        below = memory.TERMS[: memory.TERMS.index(term) + 1]
        for column in step.columns():
            wanted = sum(column.terms[each] for each in below) / 1e6
            assert height_at(area, (column.left + column.right) / 2) == pytest.approx(wanted, rel=1e-9), term
    top = max(y for _, y in areas[0].get_xy())
    assert top == pytest.approx(total(seen.peak) / 1e6, rel=1e-9)
    assert "MB (10⁶ bytes)" in figure.axes[0].get_ylabel()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["forward", "backward", "step"]


def height_at(area: Any, x: float) -> float:
    """The upper edge of a staircase at x."""
    corners = area.get_xy()[1:-1]  # without the two at its feet
    return float(next(y for (left, y), (right, _) in pairwise(corners) if left <= x < right))


def test_stages_are_drawn_side_by_side_on_one_scale() -> None:
    steps = [recorded(trained(stage))[0] for stage in (mz.DataParallel, mz.Zero3)]
    with pictures.drawing():
        figure = pictures.step_figure(steps, "a model")
    limits = {axes.get_ylim() for axes in figure.axes}
    assert len(figure.axes) == 2 and len(limits) == 1
    assert limits.pop()[1] * 1e6 > max(total(step.largest[1]) for step in steps)


def test_the_bars_are_what_was_measured_and_the_outlines_what_was_predicted() -> None:
    measured = {"weights": 2.0, "gradients": 2.0, "optimizer": 1.5}
    predicted = {"weights": 2.0, "gradients": 0.25, "optimizer": 1.0}
    rests = [pictures.Rest("mine", measured, None), pictures.Rest("ZeRO-2", measured, predicted)]
    with pictures.drawing():
        axes = pictures.rest_figure(rests, "a model").axes[0]
    found: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        found.setdefault((bar.get_fill(), row), []).append((bar.get_x(), bar.get_width()))
    bars, outlines = [(0, 2), (2, 2), (4, 1.5)], [(0, 2), (2, 0.25), (2.25, 1)]
    assert found == {(True, 0): bars, (True, 1): bars, (False, 1): outlines}
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts.count("5.50") == 2 and texts.count("1.50") == 2


def test_another_engines_arrays_and_scratch_are_not_in_the_picture() -> None:
    alone, _ = recorded(trained())
    other = trained(mz.DataParallel)
    beside, _ = recorded(trained())
    assert other.steps == 1 and beside.moments[0] == alone.moments[0]


def test_a_step_that_fails_is_recorded_up_to_there() -> None:
    engine, steps = trained(), list[Any]()
    with pytest.raises(ValueError, match="so far"), pictures.recording(engine, steps, "ZeRO-2"):
        engine(X)
        raise ValueError("so far")
    assert len(steps) == 1 and {phase for phase, _ in steps[0].moments} == {"forward"}
    assert len(steps[0].moments) > 5


def test_moments_outside_all_phases_count_to_the_phase_before() -> None:
    names = ["", "outside", "forward", "outside", "backward", "", "step", "outside"]
    events = [(name, {"weights": i}) for i, name in enumerate(names)]
    wanted = ["forward"] * 4 + ["backward"] * 2 + ["step"] * 2
    assert pictures.in_phases(events) == [(name, {"weights": i}) for i, name in enumerate(wanted)]


def test_neighbours_in_the_stack_differ_in_grayscale() -> None:
    shades = [pictures.lightness(face) for face, _, _ in pictures.STYLES.values()]
    assert all(abs(one - two) >= 0.2 for one, two in pairwise(shades)), shades
    without_activations = abs(shades[2] - shades[4])  # in the step
    assert without_activations >= 0.2 and round(pictures.lightness("#ffffff"), 6) == 1
    hatches = [hatch for _, hatch, _ in pictures.STYLES.values() if hatch]
    assert len(set(hatches)) == len(hatches) == 4


def test_without_a_suffix_both_forms_are_written_and_remaking_changes_nothing(tmp_path: Path) -> None:
    step, _ = recorded(trained())
    rest = pictures.Rest("ZeRO-2", {"weights": 2.0, "gradients": 0.25, "optimizer": 1.0}, None)
    contents = []
    for _ in range(2):
        written = pictures.draw(str(tmp_path / "mine"), "N = 1, float32, mlp", [step], [rest])
        contents.append([Path(name).read_bytes() for name in written])
    names = ["mine-step.png", "mine-step.svg", "mine-rest.png", "mine-rest.svg"]
    assert [Path(name).name for name in written] == names and sorted(os.listdir(tmp_path)) == sorted(names)
    assert contents[0] == contents[1]
    for name in names:
        valid(tmp_path / name, "N = 1, float32, mlp")
    assert b"<dc:date>" not in contents[0][1]


def valid(path: Path, *texts: str) -> None:
    """Is this a picture of about 800 pixels, with something on it? Of a vector's texts, are these there?"""
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
            colors = image.convert("RGB").getcolors(1 << 20)
            assert image.format == "PNG" and image.width == 800 and image.height >= 150
        assert colors and len(colors) > 8, path
        return
    root = ET.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("width") == "576pt"
    words = " ".join("".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text"))
    assert all(text in words for text in texts), words


def test_a_suffix_says_which_form_and_dots_in_a_name_stay() -> None:
    assert pictures.files("out/v1.2.svg") == {
        "step": [Path("out/v1.2-step.svg")],
        "rest": [Path("out/v1.2-rest.svg")],
    }


def test_with_plot_a_lesson_prints_the_same_and_then_the_pictures(tmp_path: Path) -> None:
    options = ("--steps", "4", "--micro-batches", "2", "--width", "40")
    plain = run_ranks(3, ZERO3, *options).stdout
    plotted = run_ranks(3, ZERO3, *options, "--plot", tmp_path / "zero.svg").stdout
    assert "same bits as plain DP: yes" in plain and plotted.startswith(plain)
    more = plotted.removeprefix(plain).split("\n")
    names = [tmp_path / "zero-step.svg", tmp_path / "zero-rest.svg"]
    assert f"Pictures: {names[0]}, {names[1]}" in more and sorted(tmp_path.iterdir()) == sorted(names)
    valid(names[0], *STAGES, "N = 3, bfloat16, mlp of 4 layers, width 40, batch 480 in 2 micro-batches", "backward")
    valid(names[1], *STAGES, "12.00", "4.00")

    rows = [line for line in more if line.startswith(STAGES)]
    assert [row.split()[0] for row in rows] == list(STAGES)
    numbers = [[int(word) for word in re.findall(r"\d+", row.split(maxsplit=1)[1].replace(",", ""))] for row in rows]
    drawn = [float(number) for number in re.findall(r">([\d.]+) MB<", names[0].read_text())]
    for (*terms, whole), height in zip(numbers, drawn, strict=True):
        assert sum(terms) == whole == pytest.approx(1e6 * height, abs=5.1e3)
    held = [line.split("│")[2] for line in plain.splitlines() if line.startswith(STAGES) and "bytes" in line][:4]
    at_rest = [int(re.findall(r"[\d,]+", cell)[0].replace(",", "")) for cell in held]
    for (weights, gradients, optimizer, *_), rest in zip(numbers, at_rest, strict=True):
        assert weights + gradients + optimizer <= rest  # of these, nothing more is ever held


def test_json_stays_one_object_and_names_the_pictures(tmp_path: Path) -> None:
    options = (ZERO1, "--json", "--steps", "2", "--model", "gpt", "--layers", "1", "--batch", "4")
    plain = json.loads(run_python(*options).stdout)
    facts = json.loads(run_python(*options, "--plot", tmp_path / "one.png").stdout)
    assert facts.pop("pictures") == [str(tmp_path / f"one-{which}.png") for which in ("step", "rest")]
    assert facts["options"].pop("plot") and plain["options"].pop("plot") is None
    assert facts == plain  # every loss, byte and verdict
    for path in tmp_path.iterdir():
        valid(path)


def test_without_matplotlib_a_lesson_runs_and_plot_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(NO_MATPLOTLIB)
    path = {"PYTHONPATH": python_path(tmp_path)}
    assert "same bits as plain DP: yes" in run_python(ZERO1, "--steps", "2", env=path).stdout
    done = run_ranks(3, ZERO1, "--plot", tmp_path / "zero.png", check=False, env=path)
    assert done.returncode and not done.stdout and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "02_zero1.py" in line]
    assert len(lines) == 1 and "pip install 'minizero[plot]'" in lines[0]


@pytest.mark.parametrize(
    "file, complaint",
    [
        ("zero.jpg", "cannot draw .jpg: choose .png, .svg, or no suffix for both"),
        ("nowhere/zero.png", "nowhere is no directory that can be written to"),
        (".", ". is a directory: name a file"),
        ("", "(nothing) is a directory: name a file"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused(file: str, complaint: str) -> None:
    assert complaint in pictures.refusal(file)
    if file == "zero.jpg":
        done = run_python(ZERO1, "--plot", file, check=False)
        assert done.returncode == 2 and complaint in done.stderr and "loss" not in done.stdout


def test_a_file_that_can_be_drawn_is_not_refused(tmp_path: Path) -> None:
    assert not any(pictures.refusal(str(tmp_path / name)) for name in ("zero", "zero.png", "v1.2.svg"))


def test_a_budget_is_a_line_on_the_scale_and_what_is_above_it_was_refused() -> None:
    steps = [pictures.Step("DP", [("step", terms(7_130_000))]), pictures.Step("ZeRO-1", [("step", terms(5_370_000))])]
    with pictures.drawing():
        figure, without = pictures.step_figure(steps, "a model", 7_000_000), pictures.step_figure(steps, "a model")
        roomy = pictures.step_figure(steps, "a model", 20_000_000)
    for axes in figure.axes:
        assert [list(line.get_ydata()) for line in axes.lines] == [[7, 7]]
        assert "budget 7 MB" in [text.get_text() for text in axes.texts]
    heights = [[text.get_text() for text in axes.texts if text.get_text()[0] in "57"] for axes in figure.axes]
    assert heights == [["7.13 MB refused"], ["5.37 MB"]]
    assert not any(axes.lines for axes in without.axes)
    assert roomy.axes[0].get_ylim()[1] > 20


def terms(size: int) -> dict[str, int]:
    return dict.fromkeys(memory.TERMS, 0) | {"weights": size}


def test_lesson_05_draws_the_step_that_failed_and_the_one_that_did_not(tmp_path: Path) -> None:
    done = run_ranks(5, "lessons/05_out_of_memory.py", "--case", "A", "--plot", tmp_path / "five.svg")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "five-rest.svg", tmp_path / "five-step.svg"]
    assert str(tmp_path / "five-step.svg") in done.stdout and str(tmp_path / "five-rest.svg") in done.stdout
    valid(tmp_path / "five-rest.svg", "DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "12.0", "5.6")  # 4 + 8/5 at N = 5
    valid(tmp_path / "five-step.svg", "DP", "ZeRO-1", "N = 5, bfloat16, mlp of 17 layers", "budget 7 MB", "refused")
    drawing = (tmp_path / "five-step.svg").read_text()
    drawn = [float(number) for number in re.findall(r">([\d.]+) MB(?: refused)?<", drawing)]
    rows = [line for line in done.stdout.splitlines() if re.match(r"(DP|ZeRO-1) .*│", line)]
    numbers = [[int(word) for word in re.findall(r"\d+", row.split(maxsplit=1)[1].replace(",", ""))] for row in rows]
    assert len(numbers) == len(drawn) == 2
    for (*each, whole), height in zip(numbers, drawn, strict=True):
        assert sum(each) == whole == pytest.approx(1e6 * height, abs=5.1e3)
    assert numbers[0][-1] > 7_000_000 > numbers[1][-1]  # the first was refused
    asked, held = re.findall(r"([\d,]+) bytes more .* held: ([\d,]+)", done.stdout.replace("\n  ", " "))[0]
    assert numbers[0][-1] == int(asked.replace(",", "")) + int(held.replace(",", ""))
    assert numbers[1][2] == 4 * numbers[1][0] / 5  # moments: 8 bytes instead of 2, in 5 parts
    assert pictures.refusal(str(tmp_path / "five.jpg"))
    bad = run_python("lessons/05_out_of_memory.py", "--plot", "five.jpg", check=False)
    assert bad.returncode == 2 and "cannot draw .jpg" in bad.stderr and "Case" not in bad.stdout


def test_each_text_shows_its_small_pictures_with_words_for_who_cannot_see_them() -> None:
    shown = set()
    for text in sorted(LESSONS.glob("0[1-4]*.md")):
        found = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text.read_text(encoding="utf-8").replace("\n", " "))
        assert len(found) == 2, text.name
        for words, target in found:
            assert len(words) > 60 and re.fullmatch(rf"pictures/{text.name[:2]}-(step|rest)\.png", target), target
            for path in (LESSONS / target, (LESSONS / target).with_suffix(".svg")):
                valid(path, "N = 8, bfloat16, mlp of 4 layers, width 128, batch 480", STAGES[int(text.name[:2]) - 1])
                assert path.stat().st_size < 60_000, path
                shown.add(path)
    words05 = (LESSONS / "05_out_of_memory.md").read_text(encoding="utf-8").replace("\n", " ")
    found = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", words05)
    assert [target for _, target in found] == ["pictures/05-step.png", "pictures/05-rest.png"]
    for (words, target), shows in zip(found, ("7.00 MB refused", "ZeRO-3"), strict=True):
        assert len(words) > 60
        for path in (LESSONS / target, (LESSONS / target).with_suffix(".svg")):
            valid(path, "N = 8, bfloat16, mlp of 17 layers, width 256, 4 examples per rank", "ZeRO-1", shows)
            assert path.stat().st_size < 60_000, path
            shown.add(path)
    assert set((LESSONS / "pictures").iterdir()) == shown


@pytest.mark.parametrize("number", range(1, 5))
def test_the_words_beside_a_picture_name_its_highest_points(number: int) -> None:
    (text,) = LESSONS.glob(f"0{number}_*.md")
    words = re.findall(rf"highest points?([^!]*)\]\(pictures/0{number}-step\.png\)", text.read_text())
    said = [float(each) for each in re.findall(r"\d\.\d+", words[0])]
    drawn = [
        float(each) for each in re.findall(r">([\d.]+) MB<", (LESSONS / f"pictures/0{number}-step.svg").read_text())
    ]
    assert len(said) == len(drawn) == number and said == pytest.approx(drawn, abs=0.0051), (said, drawn)


def test_numbers_have_three_digits_in_the_picture() -> None:
    for size, wanted in ((954_358, "0.954 MB"), (12_000_000, "12.0 MB"), (1_234_567_890, "1,235 MB")):
        terms = dict.fromkeys(memory.TERMS, 0) | {"weights": size}
        with pictures.drawing():
            figure = pictures.step_figure([pictures.Step("DP", [("forward", terms)])], "a model")
        assert wanted in [text.get_text() for text in figure.axes[0].texts], math.log10(size)
