"""Which names and keywords does CuPy have? Writes the list that the suite compares minizero with.

    python tests/list_cupy.py [FILE]        needs CuPy, but no GPU; writes tests/cupy_names.txt

One name a line, with its parameters where it can be called: `cupy.argsort(a, axis, kind)`. `*` and `**` stand for any
number of positional arguments and any keywords.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = Path(__file__).with_name("cupy_names.txt")
PLACES = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupyx")  # and the members of these classes:
CLASSES = ("cupy.ndarray", "cupy.cuda.Device", "cupy.cuda.Event", "cupy.cuda.Stream", "cupy.cuda.MemoryHook",
           "cupy.cuda.MemoryPool")  # fmt: skip


def parameters(thing: Any) -> str | None:
    """The parameters of a callable, as in `a, axis, *, out`; None for what cannot be called, or says nothing."""
    if not callable(thing):
        return None
    doc = (getattr(thing, "__doc__", None) or "").strip().splitlines()
    first = re.match(r"[\w.]+\((.*)\)", doc[0].replace("\\*", "*")) if doc else None  # Cython writes it there
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        if not first:
            return "*, **"
        given = [re.split("[:=]", part)[0].split()[-1:] for part in split(first[1])]
        return ", ".join(part[0] for part in given if part and part[0] not in ("self", "/", "*"))
    if first and type(thing).__name__ == "ufunc":
        names = [part.split("=")[0].strip() for part in split(first[1])]
        return ", ".join(name for name in names if name not in ("/", "*"))
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [marks.get(p.kind, p.name) for p in signature.parameters.values() if p.name != "self"]
    return ", ".join(found)


def split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def lines() -> Iterator[str]:
    import cupy
    import cupyx  # noqa: F401  (looked up below)

    yield f"version {cupy.__version__}"
    for place in (*PLACES, *CLASSES):
        module: Any = sys.modules[place.split(".")[0]]
        for part in place.split(".")[1:]:
            module = getattr(module, part)
        for name in sorted(dir(module)):
            thing = getattr(module, name, None)
            hidden = name.startswith("_") and not (place == "cupy.ndarray" and name.startswith("__dlpack"))
            hidden |= place == "cupy.cuda.runtime" and not callable(thing)  # CUDA's constants
            if hidden or (inspect.ismodule(thing) and f"{place}.{name}" not in PLACES):
                continue
            given = parameters(thing)
            yield f"{place}.{name}" + (f"({given})" if given is not None else "")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else NAMES
    target.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
    print(f"{sum(1 for _ in target.open())} lines in {target}")
