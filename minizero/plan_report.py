"""How is a plan asked for, and how is it written down?

    python -m minizero plan --params 13e9 --ranks 8 --device-memory 80GB
    python -m minizero plan --gpt layers=32,width=4096,heads=32,vocab=50257,time=2048,batch=1 --ranks 2,8,200
    python -m minizero plan --params 13e9 --dp 2 --pp 2 --tp 2          # a part of the model: see plan_mesh.py

The numbers are plan.py's. `collect` puts them in one dictionary, which is what --json prints; `lines` writes that
dictionary for people. Every number has a unit: GB is 10^9 bytes, GiB is 2^30.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from . import plan, plan_mesh
from .plan import STAGES, Recipe, at_rest, format_bytes, peaks, traffic
from .sizes import FLOAT, Sizes

STATE = plan.TERMS[:3]
OPTIMIZERS = {"adam": "Adam", "momentum": "SGD with momentum", "sgd": "SGD"}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
GPT_KEYS = ("vocab", "width", "heads", "layers", "batch", "time", "context", "tied")
MOST_LAYERS = 1_000
MANY = 1 << 16  # ranks beyond which no plan is looked for
POWERS = {"B": 0, "kB": 3, "MB": 6, "GB": 9, "TB": 12}
OUTSIDE = "fragmentation, the batch itself, and what CUDA, MPI and the framework's own context take"
BUFFERS = "temporary buffers (gathered units, gradients in passing, casts, scratch of ring and optimizer)"
Figures = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", metavar="N", help="how many parameters: 13e9, 13B, 350M")
    model.add_argument("--gpt", metavar="KEY=N,...", help=f"a GPT: {', '.join(GPT_KEYS)}")
    parser.add_argument("--ranks", metavar="N,...", help="how many ranks there are, as 8 or 2,8,200 (8)")
    plan_mesh.add_options(parser)
    parser.add_argument(
        "--dtype", default="bfloat16", help=f"of weights and gradients: {', '.join(plan.WIDTHS)} (bfloat16)"
    )
    parser.add_argument("--optimizer", default="adam", help=f"{', '.join(plan.MOMENTS)} (adam)")
    parser.add_argument("--master", action="store_true", help="with a float32 master copy of 16-bit weights")
    parser.add_argument("--device-memory", metavar="SIZE", help="of one device: 80GB (10^9 bytes) or 80GiB (2^30)")
    parser.add_argument("--json", action="store_true", help="the same figures for programs, in bytes")


def parse_count(text: str) -> int:
    """A number of parameters: "13e9", "13B", "350M", "1,000". Raises ValueError."""
    plain = re.sub(r"^([0-9]{1,3})((?:,[0-9]{3})+)$", lambda m: m[0].replace(",", ""), text.strip())[:40]
    found = re.fullmatch(r"([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)([kmbt]?)", plain, re.IGNORECASE)
    count = Decimal(found[1]) * COUNTS[found[2].lower()] if found else Decimal(0)
    if not 1 <= count <= 10**15 or count != int(count):
        raise ValueError(f"--params {text[:40]}: write a whole number from 1 to 1e15, such as 13e9, 13B or 350M")
    return int(count)


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks: "8" or "2,8,200". Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,6}", part) for part in parts):
        raise ValueError(f"--ranks {text}: write whole numbers of at least 1, such as 8 or 2,8,200")
    return list(dict.fromkeys(map(int, parts)))


def parse_gpt(text: str) -> dict[str, Any]:
    """What `plan.gpt` takes, from "layers=32,width=4096,...". Raises ValueError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, _, number = (each.strip() for each in part.partition("="))
        if key not in GPT_KEYS:
            raise ValueError(f"--gpt: {key or part!r} is no part of a GPT: give {', '.join(GPT_KEYS)}")
        if key in found or not re.fullmatch("[0-9]{1,12}", number):
            raise ValueError(f"--gpt: {key} needs one whole number, as in {key}={found.get(key, 8)}")
        found[key] = int(number)
    if found.get("layers", 0) > MOST_LAYERS:
        raise ValueError(f"--gpt: {found['layers']} layers are more than the {MOST_LAYERS:,} that can be planned")
    if found.get("tied", 1) > 1:
        raise ValueError("--gpt: write tied=1 or tied=0")
    missing = [key for key in GPT_KEYS[:5] if key not in found]
    if "time" not in found and "context" not in found:
        missing.append("time")
    if missing:
        raise ValueError(f"--gpt: {', '.join(missing)} missing, as in --gpt {text},{missing[0]}=8")
    return {"context": found.get("time"), **found, "tied": bool(found.get("tied", 1))}


def collect(options: argparse.Namespace) -> Figures:
    """All figures of a plan, in bytes. Raises ValueError for what cannot be planned, in one sentence."""
    recipe = Recipe(options.dtype, options.optimizer, options.master)
    gpt = parse_gpt(options.gpt) if options.gpt is not None else None
    mesh = plan_mesh.parse(options)
    sizes = mesh.part(gpt, recipe) if gpt else None
    parameters = sizes.parameters if sizes else mesh.share(parse_count(options.params))
    device = plan.parse_bytes(options.device_memory) if options.device_memory is not None else None
    if device is not None and device < 1:
        raise ValueError(f"--device-memory {options.device_memory}: must be more than nothing")
    per_parameter = dict(zip(STATE, (recipe.weight, recipe.gradient, recipe.state), strict=True))
    figures: Figures = {
        "parameters": parameters,
        "dtype": recipe.dtype,
        "optimizer": recipe.optimizer,
        "master": recipe.master,
        "bytes_per_parameter": per_parameter,
        "device_memory": device,
        "mesh": mesh.figures(sizes, gpt, recipe),
    }
    if sizes and gpt:
        unit = sizes.largest
        figures["gpt"] = gpt
        figures["activations"] = sizes.live * sizes.activations * recipe.wide // FLOAT
        figures["largest_unit"] = {
            "name": unit.name,
            "parameters": unit.elements,
            "bytes": unit.elements * recipe.weight,
            "cast": max(unit.parameters) * recipe.wide * (recipe.wide > recipe.weight),
        }
    ranks = [mesh.dp] if mesh.given else parse_ranks(options.ranks or "8")
    plans = [_on(n, sizes, parameters, recipe, device, mesh.micro_batches) for n in ranks]
    apart = f"dropout's masks, {OUTSIDE}" if sizes else f"activations, {BUFFERS}, padding, {OUTSIDE}"
    return {**figures, "plans": plans, "not_counted": apart}


def _on(ranks: int, sizes: Sizes | None, parameters: int, recipe: Recipe, device: int | None, k: int) -> Figures:
    """The figures for one number of ranks that do the same, on other data."""
    stages: dict[str, Figures] = {}
    trained = sizes.parameters + plan.padding(sizes, ranks) if sizes else parameters
    for stage in STAGES:
        held = at_rest(sizes or parameters, recipe, stage, ranks)
        divided = plan.shares(stage, 2)
        floor = sum(b for b, n in zip((recipe.weight, recipe.gradient, recipe.state), divided, strict=True) if n == 1)
        total = sum(held.values())
        stages[stage] = {
            "at_rest": {term: _whole(held[term]) for term in STATE},
            "total": _whole(total),
            "bytes_per_parameter": _whole(total / parameters),
            "factor": sum(at_rest(sizes or parameters, recipe, "DP", ranks).values()) / total,
            "floor": floor * parameters,
            "sent_per_step": _whole(traffic(stage, k) * recipe.weight * trained * (ranks - 1) / ranks),
        }
        if sizes:
            moments = peaks(sizes, recipe, stage, ranks)
            stages[stage]["peaks"] = moments
            stages[stage]["peak_in"] = max(moments, key=lambda phase: sum(moments[phase].values()))
        stages[stage]["needs"] = _whole(_needs(sizes or parameters, recipe, stage, ranks))
    found: Figures = {"ranks": ranks, "padding": trained - parameters, "stages": stages}
    if device is not None:
        found["fit"] = [stage for stage in STAGES if stages[stage]["needs"] <= device]
        found["recommended"] = found["fit"][0] if found["fit"] else None
        if not found["fit"]:
            found["fit_on_more_ranks"] = {
                stage: more for stage in STAGES if (more := _more(sizes or parameters, recipe, stage, ranks, device))
            }
    return found


def _needs(what: int | Sizes, recipe: Recipe, stage: str, ranks: int) -> float:
    """Bytes that a rank must have: those at rest, or with `Sizes` those of a step's largest moment."""
    if isinstance(what, Sizes):
        return max(sum(terms.values()) for terms in peaks(what, recipe, stage, ranks).values())
    return sum(at_rest(what, recipe, stage, ranks).values())


def _more(what: int | Sizes, recipe: Recipe, stage: str, ranks: int, device: int) -> int | None:
    """The smallest number of ranks, of twice, four times ... as many, on which a stage fits."""
    while stage != "DP" and ranks < MANY:
        ranks *= 2
        if _needs(what, recipe, stage, ranks) <= device:
            return ranks
    return None


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


# Writing.


def report(options: argparse.Namespace) -> str:
    """The whole answer, as text or JSON. Raises ValueError."""
    figures = collect(options)
    if options.json:
        return json.dumps(figures, indent=2)
    return "\n".join(lines(figures, options.device_memory))


def lines(figures: Figures, device: str | None) -> Iterator[str]:
    each = list(figures["bytes_per_parameter"].values())
    master = ", float32 master copy" if figures["master"] and figures["dtype"] == "bfloat16" else ""
    yield (f"{figures['parameters']:,} parameters in {figures['dtype']}, {OPTIMIZERS[figures['optimizer']]}{master}: "
           f"{' + '.join(map(str, each))} = {sum(each)} bytes each")  # fmt: skip
    yield from plan_mesh.lines(figures)
    if "gpt" in figures:
        gpt, unit = figures["gpt"], figures["largest_unit"]
        time, live = gpt.get("time") or gpt["context"], figures["mesh"]["live"]
        times = f"{live} times " * (live > 1)
        yield (f"activations: {format_bytes(figures['activations'])} for {times}{gpt['batch']} x {time:,} tokens, "
               "the same in every stage")  # fmt: skip
        text = f"largest unit: {unit['name']}, {unit['parameters']:,} parameters, {format_bytes(unit['bytes'])} whole"
        if unit["cast"]:
            text += f", and for a moment {format_bytes(unit['cast'])} more, to have its largest matrix in float32"
        yield from _wrap(text)
    plans = figures["plans"]
    scale = _scale(max(s["needs"] for p in plans for s in p["stages"].values()))
    yield ""
    unit = f"{scale} (10^{POWERS[scale]} bytes)"
    yield f"Held by every rank between backward and step, in {unit} and in bytes per parameter (B/p)"
    for each_plan in plans:
        yield from _table(figures, each_plan, scale)
    yield ""
    yield "as N grows: what is left of the total on ever more ranks"
    psi = format_bytes(figures["parameters"] * each[0])
    k = figures["mesh"]["micro_batches"]
    formulas = ", ".join(str(traffic(stage, k)) for stage in STAGES)
    of = "one micro-batch" if k == 1 else f"{k} micro-batches, each reduced as it finishes"
    yield from _wrap(f"sent: by a rank per step of {of}, {formulas} Ψ(N-1)/N with Ψ = {psi}, all weights")
    yield from plan_mesh.traffic_lines(figures)
    if len(plans) > 1:
        yield from _by_ranks(plans, scale)
    if "gpt" in figures:
        for each_plan in plans:
            yield from _moments(each_plan, scale)
    if device is not None:
        for each_plan in plans:
            yield ""
            yield from _verdict(figures, each_plan, device)
    yield ""
    yield from _wrap(f"Not counted: {figures['not_counted']}.")


def _scale(largest: float) -> str:
    """The unit in which the largest number has one to four digits before the point."""
    return next((unit for unit, power in reversed(POWERS.items()) if largest >= 2 * 10**power), "B")


def _number(value: float, end: str = "") -> str:
    """With two places, but blanks for zeros at the end: a column is aligned at its points."""
    text = f"{value:,.2f}"
    return (text.rstrip("0").rstrip(".") + end).ljust(len(text))


def _row(label: str, cells: list[tuple[str, str]]) -> str:
    return (f"{label:16}" + "".join(f"{a:>11}{b:>8}" for a, b in cells)).rstrip()


def _table(figures: Figures, found: Figures, scale: str) -> Iterator[str]:
    stages, parameters, unit = found["stages"].values(), figures["parameters"], 10 ** POWERS[scale]

    def row(label: str, values: list[float]) -> str:
        return _row(label, [(_number(v / unit), _number(v / parameters)) for v in values])

    yield ""
    yield _row("", [(stage, "") for stage in STAGES])
    yield _row(_ranks(found["ranks"]), [(scale + "   ", "B/p   ")] * 4)
    for term in STATE:
        yield row(term, [stage["at_rest"][term] for stage in stages])
    yield row("total", [stage["total"] for stage in stages])
    yield _row("less than DP", [(_number(stage["factor"], end="x"), "") for stage in stages])
    yield row("as N grows", [stage["floor"] for stage in stages])
    yield row("sent", [stage["sent_per_step"] for stage in stages])


def _ranks(ranks: int) -> str:
    return f"{ranks:,} rank{'s' * (ranks > 1)}"


def _by_ranks(plans: list[Figures], scale: str) -> Iterator[str]:
    unit = 10 ** POWERS[scale]
    yield ""
    yield f"The totals side by side, in {scale}: DP's bill does not shrink, however many ranks share the work"
    yield _row("", [(stage, "") for stage in STAGES])
    for found in plans:
        yield _row(_ranks(found["ranks"]), [(_number(s["total"] / unit), "") for s in found["stages"].values()])
    yield _row("as N grows", [(_number(s["floor"] / unit), "") for s in plans[0]["stages"].values()])


def _moments(found: Figures, scale: str) -> Iterator[str]:
    stages, unit = list(found["stages"].values()), 10 ** POWERS[scale]

    def row(label: str, values: list[float]) -> str:
        return _row(label, [(_number(value / unit), "") for value in values])

    yield ""
    yield f"The largest moment of each phase of a step on {_ranks(found['ranks'])}, replayed, in {scale}"
    yield _row("", [(stage, "") for stage in STAGES])
    for phase in plan.PHASES:
        yield row(phase, [sum(stage["peaks"][phase].values()) for stage in stages])
    yield row("a rank needs", [stage["needs"] for stage in stages])
    yield _row("  reached in", [(stage["peak_in"], "") for stage in stages])
    for term in plan.TERMS:
        yield row(f"  {term}", [stage["peaks"][stage["peak_in"]][term] for stage in stages])


def _verdict(figures: Figures, found: Figures, device: str) -> Iterator[str]:
    """One rule: the first stage that fits; and what each further one costs in traffic."""
    stages, size, fit = found["stages"], figures["device_memory"], found["fit"]
    what = "in a step" if "gpt" in figures else "at rest"
    each = f"{_ranks(found['ranks'])} of {_device(device, size)}"
    yield f"On {each}, {what}; recommended is the first stage that fits"
    for stage in STAGES:
        needs, sent = stages[stage]["needs"], stages[stage]["sent_per_step"]
        room = f"leaves {format_bytes(size - needs)}" if stage in fit else f"{format_bytes(needs - size)} too much"
        advice = ""
        if fit and stage == fit[0]:
            advice = f"recommended; sends {format_bytes(sent)} a step"
        elif fit and stage in fit:
            first = stages[fit[0]]["sent_per_step"]
            times = ", as much" if sent == first else f", {sent / first:.2g} times as much"
            advice = f"sends {format_bytes(sent)} a step{times}"
        yield f"  {stage:8} {format_bytes(needs):>9}  {'fits' if stage in fit else 'no':5} {room:20}  {advice}".rstrip()
    if not fit:
        yield from _cures(figures, found, size)
    elif "gpt" not in figures:
        yield from _wrap("Activations and temporary buffers come on top: --gpt counts them.", "  ")


def _cures(figures: Figures, found: Figures, size: int) -> Iterator[str]:
    more = found["fit_on_more_ranks"]
    if more:
        where = ", ".join(f"{stage} on {_ranks(ranks)}" for stage, ranks in more.items())
        yield from _wrap(f"No stage fits. What would help: more ranks ({where}).", "  ")
    else:
        yield from _wrap(f"No stage fits, and none will on any number of ranks up to {MANY:,}.", "  ")
    if "gpt" in figures and figures["activations"] > size / 2:
        yield from _wrap(
            f"Activations alone are {format_bytes(figures['activations'])}, and no stage shrinks them: a smaller "
            "batch, a shorter sequence, or recomputation does.", "  "
        )  # fmt: skip
    yield from _wrap(
        "On the same ranks, the model itself must be divided (tensor parallelism splits each layer, a pipeline the "
        "depth), or a parameter must cost fewer bytes.", "  "
    )  # fmt: skip


def _device(given: str, size: int) -> str:
    text = given.strip()
    return f"{text} ({format_bytes(size)})" if "i" in text.lower() else format_bytes(size)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent)
