"""How do the lesson texts stay true while the code under them changes?

Code and output are never copied by hand: a marker says what is shown, this script fills the block below it.

    <!-- quote: minizero/zero2.py Zero2.reduce -->     a function, class, method or constant
    <!-- quote: ring.py reduce_scatter nodoc -->       a file of minizero/, here without docstrings
    <!-- quote: lessons/03_zero2.py -->                a whole file
    <!-- diff: zero1.py Zero1 zero2.py Zero2 -->       from one piece to another, unchanged lines included
    <!-- output: mpirun -n 8 python lessons/03_zero2.py -->               what a command prints (stdout)
    <!-- output: python -m minizero plan from="ZeRO-1" to="ZeRO-3" -->    from a line with ... to one with ...

    python lessons/quote.py            rewrite the blocks in lessons/*.md and README.md
    python lessons/quote.py --check    name each block that is stale or cannot be made; exit 1 if there is one
    ... --no-run, --only FILE          leave commands out; this file only (may be repeated)

Code must match to the letter. So must output, but for what differs from one machine to the next (`masked`):
  1. a number right after loss, accuracy, perplexity, gradient norm or ≈; times and rates; the rest of a line
     after "MPI:", "machine:" or "sample:". Nothing of this holds in a line with a byte unit, Ψ or "same bits":
     no memory or traffic figure can rot unnoticed;
  2. hashes (8 hexadecimal digits or more), of which only *which are equal* must match.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import dropwhile, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {  # plain text; as root, and more ranks than cores, also under Open MPI
    "NO_COLOR": "1", "TTY_COMPATIBLE": "0", "COLUMNS": "100", "PYTHONUTF8": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
MARKER = re.compile(r"\s*<!--\s*(\w+):\s*(.*?)\s*(-->)?\s*")
OUTPUT = re.compile(r'(.*?)(?: from="([^"]*)")?(?: to="([^"]*)")?')
FENCE = re.compile(r"\s*(`{3,})[^`]*")
EXACT = re.compile(r"(?<![A-Za-z])(?:bytes?|[kKMGTP]?i?B)\b(?!/s)|Ψ|same bits")
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
SCORE = rf"(?:\b(?:loss|accuracy|perplexity|gradient norm)\b[ :=]*|≈ ?){NUMBER}(?: ?%)?"
SCORES = re.compile(rf"{SCORE}(?: *(?:→|->) *{NUMBER}(?: ?%)?)*")
TIME = rf"\b\d+:\d\d:\d\d\b|{NUMBER} ?(?:[nµum]?s|seconds?|minutes?|(?:[kMG] ?)?\w+/s)\b"
OTHER = re.compile(rf"{TIME}|(?<=\bMPI:).*|(?<=\b[Mm]achine:).*|(?<=\b[Ss]ample:).*")
HASH = re.compile(r"(?<![.\w])(?!\d+e\d*\b)(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}\b")


def blocks(lines: Sequence[str]) -> Iterator[tuple[int, str, str, int, int, str]]:
    """Yield (line number, kind, spec, start, stop, error) for each marker of a text, in order.

    `lines[start:stop]` is the fenced block below the marker, empty where there is none. A marker inside a
    fenced block is only an example of one.
    """
    at, padded = 0, [*lines, "", ""]
    while at < len(lines):
        marker, error = MARKER.fullmatch(lines[at]), ""
        start = stop = at + 1 if marker else at
        if fence := FENCE.fullmatch(padded[start]):
            closing = re.compile(rf"\s*{fence[1]}`*\s*")
            stop = next((i + 1 for i in range(start + 1, len(lines)) if closing.fullmatch(lines[i])), 0)
            if not stop:
                stop, error = len(lines), f"the fence in line {start + 1} is never closed"
        elif marker and not padded[start].strip() and FENCE.fullmatch(padded[start + 1]):
            error = "a blank line parts the marker from its block"
        if marker and not (marker[1] in ("quote", "diff", "output") and marker[3]):
            error = "a marker is one line: <!-- quote: ... -->, <!-- diff: ... --> or <!-- output: ... -->"
        if marker or error:
            kind, spec = (marker[1], marker[2]) if marker else ("fence", lines[at].strip())
            yield at + 1, kind, spec, start, stop, error
        at = max(stop, at + 1)


def piece(root: Path, name: str, dotted: str = "", *, nodoc: bool = False) -> list[str]:
    """Return the lines of a file, or of what `dotted` names in it (of a property and its setter: both)."""
    path = root / name if (root / name).exists() else root / "minizero" / name
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix != ".py" and not dotted and not nodoc:
        return lines
    found: list[ast.AST] = [ast.parse("\n".join(lines), name)]
    for part in dotted.split(".") if dotted else []:
        found = [child for node in found for child in getattr(node, "body", []) if part in names(child)]
    if not found:
        raise ValueError(f"there is no {dotted} in {name}")
    dropped = {line for node in found for line in docstrings(node, lines)} if nodoc else set()
    result: list[str] = []
    for node in found:
        first = min(getattr(each, "lineno", 1) for each in (node, *getattr(node, "decorator_list", [])))
        numbers = range(first, getattr(node, "end_lineno", len(lines)) + 1)
        indent = " " * getattr(node, "col_offset", 0)
        result += [lines[i - 1].removeprefix(indent) for i in numbers if i not in dropped] + [""]
    return result


def names(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", "")] + [target.id for target in targets if isinstance(target, ast.Name)]


def docstrings(top: ast.AST, lines: Sequence[str]) -> Iterator[int]:
    """Yield the numbers, from 1, of the lines of a piece's docstrings and of the blank lines after each."""
    for node in ast.walk(top):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())) as text, _, *_]:
                last = text.end_lineno or 0
                while not lines[last].strip():  # lines[last] is the line after it
                    last += 1
                yield from range(text.lineno, last + 1)


def execute(command: str, root: Path) -> list[str]:
    """Return the lines that a command prints in the repository root; it must succeed, and in time."""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | SETTINGS
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()])
    run = subprocess.run(
        shlex.split(command), cwd=root, env=environment, timeout=600,  # seconds
        capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if run.returncode:
        raise ValueError(f"failed with status {run.returncode}: {(run.stderr + run.stdout).strip()[-500:]}")
    return run.stdout.split("\n")


def fenced(kind: str, spec: str, root: Path, printed: Callable[[str, Path], list[str]]) -> list[str]:
    """Return the block that belongs below a marker, fences included."""
    words, nodoc = spec.removesuffix(" nodoc").split(), spec.endswith(" nodoc")
    language, half = "text", len(words) // 2
    if kind == "output" and (cut := OUTPUT.fullmatch(spec)):
        content = list(dropwhile(lambda line: (cut[2] or "") not in line, printed(cut[1], root)))
        if cut[3]:
            content = content[: next((i for i, line in enumerate(content, 1) if cut[3] in line), 0)]
    elif kind == "quote" and len(words) in (1, 2):
        language = "python" if words[0].endswith(".py") else "text"
        content = piece(root, *words, nodoc=nodoc)
    elif kind == "diff" and len(words) in (2, 4):
        old, new = (piece(root, *part, nodoc=nodoc) for part in (words[:half], words[half:]))
        language, content = "diff", list(difflib.unified_diff(old, new, n=len(old), lineterm=""))[3:]
    else:
        raise ValueError("it is like none of the examples at the top of lessons/quote.py")
    text = "\n".join(line.rstrip() for line in content).strip("\n")
    if not text:
        raise ValueError("there is nothing to show")
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", text))])
    return [fence + language, *text.split("\n"), fence]


def masked(lines: Sequence[str]) -> list[str]:
    """Return a program's output without what differs between machines: the rule at the top of this file."""
    result, hashes = list[str](), dict[str, str]()
    for line in lines:
        if not EXACT.search(line):
            plain = OTHER.sub("#", SCORES.sub(lambda score: re.sub(NUMBER, "#", score[0]), line))
            line = line if plain == line else re.sub(" +", " ", plain)  # a shorter number shifts the rest
        result.append(HASH.sub(lambda word: hashes.setdefault(word[0], f"hash {len(hashes)}"), line))
    return result


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check the texts; return 1 if a block is stale or could not be made, 0 otherwise."""
    parser = argparse.ArgumentParser(description="Fill in, or check, what the lesson texts quote.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a block is stale")
    parser.add_argument("--no-run", action="store_true", help="leave out blocks with the output of commands")
    parser.add_argument("--only", type=Path, action="append", metavar="FILE", help="this text only")
    options = parser.parse_args(arguments)
    texts = options.only or [*sorted((root / "lessons").glob("*.md")), *root.glob("README.md")]
    count, errors, printed = 0, 0, cache(execute)
    for path in texts:
        lines, result, copied = path.read_text(encoding="utf-8").split("\n"), list[str](), 0
        for number, kind, spec, start, stop, error in blocks(lines):
            old = new = lines[start:stop]
            count += 1
            try:
                if error or (options.check and not old):
                    raise ValueError(error or "there is no fenced block right below the marker")
                if kind != "output" or not options.no_run:
                    new = fenced(kind, spec, root, printed)
                sides = [masked(side) if kind == "output" else side for side in (old, new)]
                for was, now in zip_longest(*sides) if options.check else ():
                    if was != now:
                        raise ValueError(f"stale: {was!r} should be {now!r}")
            except (ValueError, OSError, SyntaxError, subprocess.TimeoutExpired) as reason:
                errors += 1
                print(f"{path}:{number}: {kind}: {spec}: {reason}")
            result, copied = result + lines[copied:start] + new, stop
        if not options.check and (result := result + lines[copied:]) != lines:
            path.write_text("\n".join(result), encoding="utf-8")
    print(f"{count} blocks in {len(texts)} texts, {errors} to be mended")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
