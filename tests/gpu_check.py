"""Is minizero right on this machine's GPU, and how fast? One command, under five minutes; a table and a JSON file.

    make gpu-check                                          # or, without make or an environment of its own:
    python tests/gpu_check.py [--json FILE] [--mpi WHEEL]

Needs CuPy with a GPU, NumPy, mpi4py, ml_dtypes, threadpoolctl; no network, no compiler. Several ranks share one GPU.
What this machine lacks is said, and left out: without an MPI launcher each part runs on one rank. `--mpi` takes MPI
from a wheel file (pip download mpich), where none is installed. A part that fails keeps no other from running.

    python tests/gpu_check.py --rehearse strict             # without a GPU: on the stand-in, or on numpy
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from launch import AWARE, ROOT, STRICT, run_python

PARTS = ROOT / "tests" / "jobs" / "gpu_parts.py"
Found = dict[str, Any]


class Part(NamedTuple):
    name: str
    script: str
    arguments: tuple[str, ...]
    ranks: int
    seconds: float  # at most
    env: Mapping[str, str] = MappingProxyType({})
    needs: str = ""  # "launcher", "direct", "pytest": without it, the part is not run

    @property
    def title(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}"


def parts(dump: str) -> list[Part]:
    """In this order, so that kernels are compiled by one rank before many need them."""
    me, staged, direct = str(PARTS), {"MINIZERO_MPI_CUDA": "0"}, {"MINIZERO_MPI_CUDA": "1"}
    lesson = (str(ROOT / "lessons" / "03_zero2.py"), ("--json",))
    starved = (str(ROOT / "lessons" / "05_out_of_memory.py"), ("--json", "--case", "A", "--case", "B", "--case", "E"))
    return [
        Part("machine", me, ("machine",), 1, 60),
        Part("operations on NumPy", me, ("operations", dump), 1, 60, {"MINIZERO_BACKEND": "numpy"}, "pytest"),
        Part("operations against NumPy", me, ("operations", dump), 1, 120, {}, "pytest"),
        Part("bits on NumPy", me, ("bits",), 5, 120, {"MINIZERO_BACKEND": "numpy"}, "launcher"),
        Part("bits across stages", me, ("bits",), 5, 120),
        Part("bits across stages", me, ("bits",), 8, 120, {}, "launcher"),
        Part("20 repeats, one hash", me, ("repeats",), 5, 60),
        Part("staged ring", me, ("rings",), 4, 60, staged, "launcher"),
        Part("direct ring", me, ("rings",), 4, 60, direct, "direct"),
        Part("memory against prediction", me, ("peaks",), 8, 60),
        Part("out of memory", *starved, 8, 90, {}, "launcher"),
        Part("lesson 03", *lesson, 8, 60),
        Part("step time", me, ("speed",), 4, 60),
    ]


class Machine:
    """What there is to run jobs with."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.quick = options.rehearse is not None
        self.env: dict[str, str] = {"MINIZERO_BACKEND": "cupy", "PYTHONPATH": path_with()}
        if options.rehearse == "strict":
            self.env |= STRICT | {"STRICT_GRAIN": "512"}  # as a real pool
        elif options.rehearse:
            self.env["MINIZERO_BACKEND"] = "numpy"
        if options.mpi:
            self.env |= unpacked(options.mpi, scratch)
        path = self.env.get("PATH", os.environ.get("PATH", os.defpath))
        beside = str(Path(sys.executable).parent)
        self.launcher = shutil.which("mpiexec", path=os.pathsep.join([path, beside]))
        self.lacks: dict[str, str] = {}
        probe = [sys.executable, "-c", "from mpi4py import MPI"]
        if subprocess.run(probe, env=os.environ | self.env, capture_output=True, timeout=60).returncode:
            self.env["PYTHONPATH"] = path_with(ROOT / "tests" / "alone", self.env["PYTHONPATH"])
            self.launcher, self.lacks["launcher"] = None, "mpi4py finds no MPI library: one rank, on a double of it"
        elif not self.launcher:
            self.lacks["launcher"] = "no mpiexec on PATH: one rank"
        self.lacks["direct"] = "not known yet"
        if any(importlib.util.find_spec(name) is None for name in ("pytest", "hypothesis")):
            self.lacks["pytest"] = "the cases are those of the suite, which needs pytest and hypothesis"

    def hear(self, facts: Found) -> None:
        """The first part has found out whether MPI can read GPU memory."""
        aware, why = facts["cuda_aware"]
        if self.quick and self.env["MINIZERO_BACKEND"] == "cupy":  # the stand-in does as it is told
            aware = True
        self.lacks.pop("direct", None)
        if "launcher" in self.lacks or not aware:
            self.lacks["direct"] = self.lacks.get("launcher") or f"this MPI is not known to be CUDA-aware ({why})"

    def run(self, part: Part, left: float) -> Found:
        """What a part printed, or why it was not run, or how it failed."""
        if part.needs in self.lacks:
            return {"verdict": "not run", "why": self.lacks[part.needs]}
        if left < 5:
            return {"verdict": "not run", "why": "no time left: see --seconds"}
        env = {**self.env, **part.env}
        if part.name == "direct ring" and self.quick:
            env |= {key: AWARE[key] for key in ("MINIZERO_MPI_CUDA", "STRICT_CUDA_AWARE")}
        ranks = part.ranks if self.launcher else 1
        command = (self.launcher, "-n", str(ranks)) if self.launcher and ranks > 1 else ()
        arguments = [*part.arguments, *["quick"] * (self.quick and part.script == str(PARTS))]
        try:
            done = run_python(part.script, *arguments, timeout=min(part.seconds, left), env=env, launcher=command,
                              check=False)  # fmt: skip
        except TimeoutError as error:
            return {"verdict": "FAILED", "why": str(error).splitlines()[0], "output": str(error)}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            last = [line for line in done.stderr.splitlines() if "Error" in line or "Fault" in line] or ["no output"]
            return {"verdict": "FAILED", "why": last[-1][-300:], "output": done.stdout + done.stderr}
        return {"verdict": "ok", "ranks": ranks, **json.loads(lines[-1])}


def path_with(*places: Any) -> str:
    return os.pathsep.join(filter(None, [*map(str, places), str(ROOT), os.environ.get("PYTHONPATH")]))


def unpacked(wheel: str, scratch: Path) -> dict[str, str]:
    """The environment in which the MPI of a wheel file is found; pip may have no place to install it to."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    launcher = next(scratch.glob("*/data/bin/mpiexec"))
    for program in launcher.parent.iterdir():
        program.chmod(0o755)
    library = sorted((launcher.parent.parent / "lib").glob("libmpi.so*"))[0]
    path = os.pathsep.join([str(launcher.parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "MPI4PY_LIBMPI": str(library)}


def near(found: list[tuple[Part, Found]]) -> Found | None:
    """Do the GPU's losses agree with NumPy's, as far as rounding allows? Bits don't: that is not promised."""
    runs = {part.name: facts for part, facts in found if part.name.startswith("bits") and part.ranks == 5}
    here, there = (runs.get(name, {}).get("losses") for name in ("bits across stages", "bits on NumPy"))
    if not here or not there or runs["bits across stages"]["ranks"] != runs["bits on NumPy"]["ranks"]:
        return None
    worst = {"float32": 0.0, "bfloat16": 0.0}
    for key, losses in there.items():
        dtype = next(each for each in worst if each in key)
        worst[dtype] = max([worst[dtype], *(abs(a - b) / (1 + abs(b)) for a, b in zip(here[key], losses, strict=True))])
    good = worst["float32"] < 1e-3 and worst["bfloat16"] < 5e-2
    return {"verdict": "ok" if good else "FAILED", "why": f"off by {worst}", "seconds": 0, **worst}


def told(part: str, facts: Found) -> str:
    """A part's finding in a few words."""
    if facts["verdict"] != "ok":
        return str(facts["why"])
    if part == "machine":
        where = f"{facts.get('device', 'CPU')}, CuPy {facts.get('cupy', '-')}, CUDA {facts.get('cuda', '-')}"
        return f"{where}, {facts['mpi']}; CUDA-aware: {facts['cuda_aware'][0]} ({facts['cuda_aware'][1]})"
    if "GB/s" in facts:
        return f"{facts['way']}: " + ", ".join(f"{speed} GB/s at {size}" for size, speed in facts["GB/s"].items())
    if "seconds per step" in facts:
        each = ", ".join(f"{stage} {1000 * s:.1f} ms" for stage, s in facts["seconds per step"].items())
        return f"{each}; {facts['parameters']:,} parameters"
    if "bytes" in facts:
        rows = [f"{k} {v['measured']:,}/{v['predicted']:,}" for k, v in facts["bytes"].items() if isinstance(v, dict)]
        return f"{', '.join(rows)} bytes; off by at most {facts['off by at most']:.1%}"
    if "verdicts" in facts:
        ills = {letter: run["illness"] for letter, run in facts["runs"].items() if "illness" in run}
        verdicts = [f"{claim}: {'yes' if v['holds'] else 'no'}" for claim, v in facts["verdicts"].items()]
        return "; ".join([", ".join(f"{letter} {illness}" for letter, illness in ills.items()), *verdicts]).strip("; ")
    skip = ("verdict", "why", "losses", "seconds", "ranks")
    return ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items() if k not in skip)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="gpu-check.json", metavar="FILE", help="where to write what was found")
    parser.add_argument("--mpi", metavar="WHEEL", help="take MPI from this wheel file")
    parser.add_argument("--rehearse", choices=("strict", "numpy"), help="without a GPU: on the stand-in, or on NumPy")
    parser.add_argument("--seconds", type=float, default=285, help="for everything; what does not fit is not run (285)")
    parser.add_argument("--only", action="append", metavar="WORD", help="only parts with this word in their names")
    options = parser.parse_args()
    begin, found = time.monotonic(), list[tuple[Part, Found]]()
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(options, Path(scratch))
        for part in parts(str(Path(scratch) / "operations.npz")):
            if options.only and part.name != "machine" and not any(word in part.title for word in options.only):
                continue
            start = time.monotonic()
            facts = machine.run(part, options.seconds - (start - begin))
            facts.setdefault("seconds", round(time.monotonic() - start, 1))
            found.append((part, facts))
            report(part._replace(ranks=facts.get("ranks", part.ranks)).title, part.name, facts)
            if part.name == "machine" and facts["verdict"] == "ok":
                machine.hear(facts)
            elif part.name == "machine":
                print(facts["output"])
                break  # nothing else can run
        compared = near(found)
        if compared:
            found.append((Part("losses near NumPy's", "", (), 5, 0), compared))
            report("losses near NumPy's", "losses", compared)
    seconds = round(time.monotonic() - begin, 1)
    rows = [{"check": part.name, "wanted ranks": part.ranks, **facts} for part, facts in found]
    Path(options.json).write_text(json.dumps({"seconds": seconds, "checks": rows}, indent=1) + "\n", encoding="utf-8")
    failed = [part.title for part, facts in found if facts["verdict"] == "FAILED"]
    for part, facts in found:
        if facts["verdict"] == "FAILED" and "output" in facts:
            print(f"\n{part.title}:\n{facts['output'][-3000:]}")
    counts = Counter(facts["verdict"] for _, facts in found)
    print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}; {seconds} s; written to {options.json}")
    return int(bool(failed))


def report(title: str, name: str, facts: Found) -> None:
    """A row of the table, as soon as it is known."""
    print(f"{facts['verdict']:8}{title:36}{facts['seconds']:7.1f} s  {told(name, facts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
