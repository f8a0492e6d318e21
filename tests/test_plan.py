"""What plan.py predicts, and what `python -m minizero plan` says of it."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from launch import ROOT, run_python, run_ranks
from minizero.__main__ import main
from minizero.plan import PHASES, STAGES, TERMS, Recipe, at_rest, format_bytes, padding, parse_bytes, peaks, traffic
from minizero.sizes import Sizes, UnitSize, gpt, mlp

JOBS = Path(__file__).parent / "jobs"
SMALL_GPT = "layers=8,width=64,heads=4,vocab=50,time=16,batch=1"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, after it ended well."""
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *arguments, "--json"))
    return found


def totals(found: dict[str, Any]) -> list[list[float]]:
    """In GB, for each number of ranks and stage."""
    return [[each["stages"][stage]["total"] / 1e9 for stage in STAGES] for each in found["plans"]]


def row(text: str, label: str) -> list[str]:
    """The cells of the first row of a table that starts so."""
    return next(line for line in text.splitlines() if line.startswith(label))[len(label) :].split()


# Bytes.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("1.5 MB", 1_500_000), ("40kB", 40_000), ("40KB", 40_000),
        ("1KiB", 1024), ("2 miB", 2 * 2**20), ("1TB", 10**12), ("1TiB", 2**40), ("512", 512),
        ("512 B", 512), (" 8e9 ", 8 * 10**9), (".5GB", 5 * 10**8), ("0", 0), ("0.1GB", 10**8),
        ("4.35 gB", 4_350_000_000),
    ],
)  # fmt: skip
def test_a_number_of_bytes_is_read_exactly_in_both_kinds_of_units(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no number"), ("GB", "no number"), ("-1GB", "no number"), ("nan", "no number"), ("1.2.3", "no number"),
        ("1e999999999", "no number"), (".", "no number"), (".e3", "no number"), ("80 XB", "no number"),
        ("8 0GB", "no number"), ("80G", "no clear unit"), ("80Gi", "no clear unit"), ("80iB", "no clear unit"),
        ("80Gb", "stands for bits"), ("80gb", "stands for bits"), ("80Gib", "stands for bits"),
    ],
)  # fmt: skip
def test_what_is_no_clear_number_of_bytes_is_refused_with_an_example(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{why}.*80GB .10\\^9 bytes. or 80GiB"):
        parse_bytes(text)


def test_bytes_are_written_in_powers_of_1000() -> None:
    written = {
        0: "0 B", 999: "999 B", 1000: "1 kB", 156e9: "156 GB", 42.25e9: "42.25 GB", 999_960: "1 MB", 2**30: "1.074 GB",
        3e12: "3 TB", 12_345e12: "12,345 TB",
    }  # fmt: skip
    assert {number: format_bytes(number) for number in written} == written


# At rest.


@pytest.mark.parametrize(
    ("recipe", "b", "s"),
    [
        (Recipe(), 2, 8), (Recipe(master=True), 2, 12), (Recipe(optimizer="momentum"), 2, 4),
        (Recipe(optimizer="sgd"), 2, 0), (Recipe(optimizer="sgd", master=True), 2, 4), (Recipe("float32"), 4, 8),
        (Recipe("float32", master=True), 4, 8), (Recipe("float64"), 8, 16), (Recipe("float64", "momentum", True), 8, 8),
    ],
)  # fmt: skip
def test_every_stage_divides_its_own_terms_and_no_other(recipe: Recipe, b: int, s: int) -> None:
    assert (recipe.weight, recipe.gradient, recipe.state) == (b, b, s)
    found = [tuple(at_rest(7_000, recipe, stage, 7).values()) for stage in STAGES]
    full = 7_000 * b, 7_000 * s
    part = 1_000 * b, 1_000 * s
    assert found == [
        (full[0], full[0], full[1]),
        (full[0], full[0], part[1]),
        (full[0], part[0], part[1]),
        (part[0], part[0], part[1]),
    ]


def test_padding_is_told_apart_and_frozen_units_cost_their_weights_only() -> None:
    sizes = Sizes((UnitSize("a", (7, 3)), UnitSize("b", (4,), trainable=False)))
    assert (sizes.parameters, padding(sizes, 4), padding(sizes, 1)) == (14, 2, 0)
    assert at_rest(sizes, Recipe(), "ZeRO-3", 4) == {"weights": 2 * 4, "gradients": 2 * 3, "optimizer": 8 * 3}
    assert at_rest(sizes, Recipe(), "ZeRO-1", 4) == {"weights": 2 * 16, "gradients": 2 * 12, "optimizer": 8 * 3}


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype 'float16' is unknown: use one of float32"):
        Recipe("float16")
    with pytest.raises(ValueError, match="optimizer 'lion' is unknown"):
        Recipe(optimizer="lion")
    for stage, ranks in (("ZeRO-4", 8), ("DP", 0)):
        with pytest.raises(ValueError, match=f"stage '{stage}' of DP, .* on {ranks} ranks"):
            at_rest(10, Recipe(), stage, ranks)


def test_traffic_of_k_micro_batches_is_that_of_the_table() -> None:
    assert [[traffic(stage, k) for stage in STAGES] for k in (1, 4)] == [[2, 3, 2, 3], [8, 9, 5, 12]]


# In a step.


def test_an_mlp_keeps_its_input_the_results_of_its_relus_and_the_probabilities() -> None:
    sizes = mlp([20, 30, 40, 10], batch=3)
    assert sizes.parameters == 21 * 30 + 31 * 40 + 41 * 10
    copies = 4 * 3 * 20 + 8 * 3  # of the input and the targets
    assert sizes.activations == 4 * 3 * (30 + 40) + 4 * 3 * 10 + 8 * 3 + 4 + copies  # and row numbers, and the loss
    assert [unit.activations for unit in sizes.units] == [4 * 3 * (20 + 30), 4 * 3 * 40, 0]


def test_a_gpt_keeps_16_widths_per_token_and_block_and_the_attention_probabilities() -> None:
    b, t, c, h, v, layers = 2, 6, 8, 4, 11, 3
    sizes = gpt(vocab=v, context=9, width=c, heads=h, layers=layers, batch=b, time=t)
    block = 12 * c * c + 13 * c
    assert sizes.parameters == v * c + 9 * c + layers * block + 2 * c
    kept = 4 * (16 * b * t * c + 2 * b * t + b * h * t * t) + t * t + 12  # norms' scales, mask, two constants
    copies = 2 * 8 * b * t  # of tokens and targets
    ends = 8 * t + 4 * (2 * b * t * c + b * t) + 4 * b * t * v + 8 * b * t + 4 + copies
    assert [unit.activations for unit in sizes.units[2:-1]] == [kept] * layers
    assert sizes.activations == layers * kept + ends
    untied = gpt(vocab=v, context=9, width=c, heads=h, layers=layers, batch=b, time=t, tied=False)
    assert untied.parameters == sizes.parameters + v * c
    assert (untied.activations, untied.units[-1].name) == (sizes.activations, "head")


def deep(layers: int) -> Sizes:
    return mlp([256] * layers + [256], batch=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peaks_fall_in_stage_order_where_units_are_many_and_activations_small(dtype: str) -> None:
    for sizes in (deep(8), gpt(vocab=50, context=8, width=128, heads=4, layers=8, batch=1)):
        recipe = Recipe(dtype)
        needs = [max(sum(t.values()) for t in peaks(sizes, recipe, stage, 8).values()) for stage in STAGES]
        assert needs == sorted(set(needs), reverse=True), f"{dtype}: {needs}"


@pytest.mark.parametrize("stage", STAGES)
def test_temporary_bytes_do_not_grow_with_the_number_of_layers(stage: str) -> None:
    few, many = (
        {phase: terms["temporary"] for phase, terms in peaks(deep(n), Recipe(), stage, 8).items()} for n in (8, 32)
    )
    assert many == few
    assert set(few) == set(PHASES)


def test_before_the_first_step_there_are_no_moments() -> None:
    first, later = (peaks(deep(8), Recipe(), "DP", 8, first=flag) for flag in (True, False))
    for phase in ("forward", "backward"):
        assert first[phase]["optimizer"] == 0
        assert later[phase]["optimizer"] == 8 * deep(8).parameters
    assert first["step"] == later["step"]


def test_gradients_are_there_in_the_forward_of_a_second_micro_batch_only() -> None:
    one, two = (peaks(deep(8), Recipe(), "ZeRO-2", 8, k)["forward"]["gradients"] for k in (1, 2))
    assert (one, two) == (0, 2 * deep(8).parameters // 8)


def test_every_moment_has_all_terms_and_none_below_zero() -> None:
    for stage in STAGES:
        for sizes in (deep(3), gpt(vocab=7, context=4, width=8, heads=2, layers=2, batch=1, tied=False)):
            for ranks in (1, 5, 1000):
                for terms in peaks(sizes, Recipe(), stage, ranks, 2).values():
                    assert tuple(terms) == TERMS and min(terms.values()) >= 0


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_step_needs_what_the_replay_predicts_and_holds_at_rest_exactly_that(ranks: int) -> None:
    done = run_ranks(ranks, JOBS / "plan_peaks.py", timeout=240)
    engines = 8 if ranks == 8 else 32
    assert f"{engines} engines: no phase of a step is further from the plan than 0." in done.stdout


def test_prediction_and_measurement_share_no_code() -> None:
    for name in ("plan", "sizes", "plan_report"):
        tree = ast.parse((ROOT / "minizero" / f"{name}.py").read_text())
        found = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        named = {
            alias.name
            for each in ast.walk(tree)
            if isinstance(each, ast.Import | ast.ImportFrom)
            for alias in each.names
        }
        shared = found - {"backend"} | named  # of the backend, a plan may know whether arrays are the host's
        assert not shared & {"memory", "allocator", "numpy", "backend", "xp"}, f"{name} imports {shared}"


# The command.


def test_13_billion_parameters_on_8_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--params", "13e9", "--ranks", "8")
    stages = found["plans"][0]["stages"]
    assert totals(found) == [[156, 65, 42.25, 19.5]]
    assert [stages[stage]["bytes_per_parameter"] for stage in STAGES] == [12, 5, 3.25, 1.5]
    assert [round(stages[stage]["factor"], 2) for stage in STAGES] == [1, 2.4, 3.69, 8]
    assert [stages[stage]["floor"] / 13e9 for stage in STAGES] == [12, 4, 2, 0]
    assert [stages[stage]["sent_per_step"] / 26e9 for stage in STAGES] == [2 * 7 / 8, 3 * 7 / 8, 2 * 7 / 8, 3 * 7 / 8]
    assert stages["ZeRO-2"]["at_rest"] == {"weights": 26e9, "gradients": 3.25e9, "optimizer": 13e9}

    text = said(capsys, "--params", "13B")
    assert row(text, "total") == ["156", "12", "65", "5", "42.25", "3.25", "19.5", "1.5"]
    assert row(text, "optimizer") == ["104", "8", "13", "1", "13", "1", "13", "1"]
    assert row(text, "less than DP") == ["1x", "2.4x", "3.69x", "8x"]
    assert row(text, "as N grows") == ["156", "12", "52", "4", "26", "2", "0", "0"]
    assert row(text, "8 ranks") == ["GB", "B/p"] * 4
    assert "Not counted: activations, temporary buffers" in text


def test_the_example_of_the_zero_paper(capsys: pytest.CaptureFixture[str]) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, K = 12."""
    found = figures(capsys, "--params", "7.5e9", "--ranks", "64", "--master")
    assert [round(total, 1) for total in totals(found)[0]] == [120, 31.4, 16.6, 1.9]
    text = said(capsys, "--params", "7.5e9", "--ranks", "64", "--master")
    assert row(text, "total")[::2] == ["120", "31.41", "16.64", "1.88"]
    assert "2 + 2 + 12 = 16 bytes each" in text


def test_more_ranks_do_not_shrink_the_bill_of_plain_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    found = totals(figures(capsys, "--params", "13e9", "--ranks", "2,8,200"))
    assert [each[0] for each in found] == [156, 156, 156]
    assert [each[3] for each in found] == [78, 19.5, 0.78]
    text = said(capsys, "--params", "13e9", "--ranks", "2,8,200")
    side_by_side = text[text.index("DP's bill does not shrink") :]
    assert row(side_by_side, "2 ranks") == ["156", "104", "91", "78"]
    assert row(side_by_side, "200 ranks") == ["156", "52.52", "26.65", "0.78"]


@pytest.mark.parametrize(
    ("size", "first", "fit"),
    [
        ("160GB", "DP", 4), ("156GB", "DP", 4), ("155.9GB", "ZeRO-1", 3), ("80GB", "ZeRO-1", 3),
        ("60 GiB", "ZeRO-2", 2), ("61GiB", "ZeRO-1", 3), ("24 GB", "ZeRO-3", 1), ("19.4GB", None, 0),
    ],
)  # fmt: skip
def test_the_first_stage_that_fits_is_recommended(
    size: str, first: str | None, fit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, "--params", "13e9", "--device-memory", size)["plans"][0]
    assert found["recommended"] == first
    assert found["fit"] == list(STAGES[4 - fit :])
    text = said(capsys, "--params", "13e9", "--device-memory", size)
    recommended = [line.split()[0] for line in text.splitlines() if "recommended;" in line]
    assert recommended == ([first] if first else [])
    assert ("No stage fits" in text) == (first is None)


def test_further_stages_are_recommended_at_their_price_in_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--params", "13e9", "--device-memory", "80GB")
    assert "ZeRO-1       65 GB  fits  leaves 15 GB          recommended; sends 68.25 GB a step" in text
    assert "ZeRO-2    42.25 GB  fits  leaves 37.75 GB       sends 45.5 GB a step, 0.67 times as much" in text
    assert "ZeRO-3     19.5 GB  fits  leaves 60.5 GB        sends 68.25 GB a step, as much" in text


def test_where_nothing_fits_more_ranks_help_down_to_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    at_most = ("--params", "13e9", "--ranks", "2", "--device-memory")
    assert figures(capsys, *at_most, "60GB")["plans"][0]["fit_on_more_ranks"] == {
        "ZeRO-1": 16, "ZeRO-2": 4, "ZeRO-3": 4,
    }  # fmt: skip
    assert figures(capsys, *at_most, "26GB")["plans"][0]["fit_on_more_ranks"] == {"ZeRO-3": 8}
    text = said(capsys, *at_most, "26GB")
    assert "What would help: more ranks (ZeRO-3 on 8 ranks)" in text and "tensor parallelism" in text


def test_activations_that_fill_a_device_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--gpt", SMALL_GPT, "--device-memory", "1MB")
    assert "none will on any number of ranks" in text
    assert "Activations alone are 572.2 kB, and no stage shrinks them" in text


def test_a_gpt_is_planned_by_the_largest_moment_of_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--gpt", SMALL_GPT, "--device-memory", "2MB")
    sizes = gpt(vocab=50, context=16, width=64, heads=4, layers=8, batch=1)
    assert found["activations"] == sizes.activations
    assert found["largest_unit"]["name"] == "blocks.0"
    for stage, each in found["plans"][0]["stages"].items():
        replayed = peaks(sizes, Recipe(), stage, 8)
        assert each["peaks"] == replayed
        assert each["needs"] == max(sum(terms.values()) for terms in replayed.values())
        assert each["at_rest"] == at_rest(sizes, Recipe(), stage, 8)
    assert found["plans"][0]["recommended"] == "ZeRO-3"
    text = said(capsys, "--gpt", SMALL_GPT)
    assert "activations: 572.2 kB for 1 x 16 tokens, the same in every stage" in text
    assert "Not counted: dropout's masks" in text
    needs = [f"{each['needs'] / 1e6:.2f}" for each in found["plans"][0]["stages"].values()]
    assert row(text, "a rank needs") == needs


@pytest.mark.parametrize(
    "arguments",
    [
        ("--params", "175B", "--ranks", "1,8,1000", "--master", "--device-memory", "80GiB"),
        ("--params", "1T", "--ranks", "9999999", "--dtype", "float64", "--device-memory", "1B"),
        ("--params", "1", "--ranks", "1", "--optimizer", "sgd"),
        ("--gpt", "layers=32,width=4096,heads=32,vocab=50257,time=2048,batch=1,tied=0", "--device-memory", "80GB"),
        ("--gpt", SMALL_GPT, "--ranks", "1,3", "--dtype", "float32", "--optimizer", "momentum", "--master"),
    ],
)
def test_the_text_fits_in_100_columns(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, *arguments).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "--params --gpt is required"),
        ("--params 13e9 --gpt layers=1", "not allowed with"),
        ("--params many", "--params many: write a whole number"),
        ("--params 0", "--params 0: write a whole number"),
        ("--params 1.5", "--params 1.5: write a whole number"),
        ("--params -3", "--params -3: write a whole number"),
        ("--params 1e999999999", "write a whole number"),
        ("--params 1e16", "--params 1e16: write a whole number from 1 to 1e15"),
        ("--params 13e9 --ranks 0", "--ranks 0: write whole numbers of at least 1"),
        ("--params 13e9 --ranks 2,,8", "--ranks 2,,8: write whole numbers"),
        ("--params 13e9 --ranks 1.5", "--ranks 1.5: write whole numbers"),
        ("--params 13e9 --dtype fp8", "dtype 'fp8' is unknown: use one of float32, float64, bfloat16"),
        ("--params 13e9 --optimizer lion", "optimizer 'lion' is unknown"),
        ("--params 13e9 --device-memory 80gb", "a small b stands for bits"),
        ("--params 13e9 --device-memory 0GB", "must be more than nothing"),
        ("--params 13e9 --stage 2", "unrecognized arguments: --stage 2"),
        ("--gpt layers=1,size=3", "'size' is no part of a GPT: give vocab, width"),
        ("--gpt layers=1", "--gpt: vocab, width, heads, batch, time missing"),
        ("--gpt layers=many", "layers needs one whole number"),
        (f"--gpt {SMALL_GPT},layers=3", "layers needs one whole number"),
        (f"--gpt {SMALL_GPT.replace('heads=4', 'heads=5')}", "multiple of its heads: 64 is none of 5"),
        (f"--gpt {SMALL_GPT},context=8", "16 tokens in a row with a context of 8"),
        (f"--gpt {SMALL_GPT.replace('batch=1', 'batch=0')}", "must be at least 1"),
        (f"--gpt {SMALL_GPT.replace('layers=8', 'layers=99999999')}", "more than the 1,000"),
    ],
)
def test_bad_input_is_one_clear_sentence_and_exit_code_2(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["plan", *arguments.split()])
    except SystemExit as left:  # what the parser itself refuses
        code = left.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert why in err and err.startswith("python -m minizero")


def test_the_command_runs_alone_and_under_a_launcher_speaks_once() -> None:
    alone = run_python("-m", "minizero", "plan", "--params", "13e9").stdout
    assert row(alone, "total")[::2] == ["156", "65", "42.25", "19.5"]
    assert run_ranks(2, "-m", "minizero", "plan", "--params", "13e9").stdout == alone
    refused = run_python("-m", "minizero", "plan", "--params", "13x", check=False)
    assert (refused.returncode, refused.stdout, "Traceback" in refused.stderr) == (2, "", False)
