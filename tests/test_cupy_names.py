"""Every name and keyword of `xp` that minizero uses exists in NumPy and in CuPy: looked up, not run.

CuPy's are in cupy_names.txt, a list that list_cupy.py has made; where CuPy is installed it is asked itself, too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from launch import ROOT
from list_cupy import NAMES

FILES = [file for place in ("minizero", "lessons") for file in sorted((ROOT / place).glob("*.py"))]
FILES.remove(ROOT / "lessons" / "pictures.py")  # which draws, on the host
KNOW_BOTH = {"backend.py", "transport.py", "comm.py", "memory.py", "allocator.py"}  # may ask CuPy for what it alone has
METHODS = {name for name in dir(np.ndarray) if not name.startswith("_")}
UFUNC = {"out", "dtype", "casting", "where", "order", "subok"}


class Use(NamedTuple):
    name: str  # "cupy.cuda.Device", "cupy.ndarray.sum", "cupyx.empty_pinned"
    keywords: tuple[str, ...]
    where: str  # file:line


def listed(file: Path = NAMES) -> dict[str, set[str] | None]:
    """Each name with its keywords; None where it takes any, or is not called."""
    found: dict[str, set[str] | None] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, bracket, given = line.partition("(")
        keywords = {part.strip() for part in given.rstrip(")").split(",")}
        found[name] = keywords if bracket and "**" not in keywords else None
    return found


def dotted(node: ast.AST) -> str:
    """xp.cuda.Device as "cupy.cuda.Device"; empty for what does not begin with a library's name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    roots = {"xp": "cupy", "cupy": "cupy", "cupyx": "cupyx"}
    root = roots.get(node.id, "") if isinstance(node, ast.Name) else ""
    if not root and isinstance(node, ast.Name) and node.id == "backend" and parts[-1:] == ["xp"]:
        root = roots[parts.pop()]
    return ".".join([root, *reversed(parts)]) if root and parts else ""


def uses(source: str, file: str) -> Iterator[Use]:
    """All names of `xp` in a file, and all methods that are called and that an array of NumPy has."""
    tree, called = ast.parse(source), set[ast.AST]()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
    methods = METHODS | ({"get", "set"} if file in KNOW_BOTH else set())

    def of_module(function: ast.Attribute) -> bool:
        return isinstance(function.value, ast.Name) and function.value.id in modules

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            name = dotted(node.func)
            if name:
                called.add(node.func)
                yield Use(name, keywords, f"{file}:{node.lineno}")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in methods and not of_module(node.func):
                yield Use(f"cupy.ndarray.{node.func.attr}", keywords, f"{file}:{node.lineno}")
    inner = {child for node in ast.walk(tree) if isinstance(node, ast.Attribute) for child in [node.value]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in called and node not in inner and dotted(node):
            yield Use(dotted(node), (), f"{file}:{node.lineno}")


def missing(use: Use, known: dict[str, set[str] | None]) -> str:
    """What CuPy lacks of a use, in words; nothing if it has it."""
    if use.name not in known:
        return f"{use.where}: CuPy has no {use.name}"
    keywords = known[use.name]
    lacking = set(use.keywords) - keywords if keywords is not None else set()
    return f"{use.where}: {use.name} of CuPy has no {', '.join(sorted(lacking))}=" if lacking else ""


def missing_in_numpy(use: Use) -> str:
    """The same for NumPy; of methods, those that are found are NumPy's by their names."""
    thing: Any = np
    for part in use.name.split(".")[1:]:
        if not hasattr(thing, part):
            return f"{use.where}: NumPy has no {use.name}, and this file does not know of CuPy"
        thing = getattr(thing, part)
    if not use.keywords or isinstance(thing, type):
        return ""
    try:
        known = UFUNC | {"axes", "axis"} if isinstance(thing, np.ufunc) else set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return ""
    lacking = set() if "kwargs" in known else set(use.keywords) - known
    return f"{use.where}: {use.name} of NumPy has no {', '.join(lacking)}=" if lacking else ""


EVERY_USE = [use for file in FILES for use in uses(file.read_text(encoding="utf-8"), file.name)]


def test_what_is_used_of_xp_is_in_the_list_of_cupys_names() -> None:
    assert [text for use in EVERY_USE if (text := missing(use, listed()))] == []


def test_what_is_used_of_xp_is_in_numpy() -> None:
    plain = [use for use in EVERY_USE if use.where.split(":")[0] not in KNOW_BOTH and use.name.startswith("cupy.")]
    assert [text for use in plain if (text := missing_in_numpy(use))] == []
    found = {use.name for use in EVERY_USE}
    assert len(plain) > 150 and {"cupy.matmul", "cupy.ndarray.astype", "cupy.asarray"} <= {use.name for use in plain}
    assert {"cupy.cuda.Event", "cupyx.empty_pinned", "cupy.cuda.MemoryHook", "cupy.ndarray.get"} <= found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("xp.unstack(a)", "no cupy.unstack"),
        ("xp.random.default_rng().normal()", "no cupy.random"),
        ("total = a.sum(axis=0, where=mask)", "no where="),
        ("xp.add(a, b, out=c, where=mask)", "no where="),
        ("a.astype('f4', copy=False, device='cpu')", "no device="),
        ("with xp.errstate(divide='ignore'): pass", "no cupy.errstate"),
        ("a.partition(3, kind='stable')", "no kind="),
        ("backend.xp.nosuch", "no cupy.nosuch"),
        ("a.setflags(write=False)", "no cupy.ndarray.setflags"),
        ("cupyx.nosuch()", "no cupyx.nosuch"),
    ],
)
def test_a_name_or_keyword_that_cupy_lacks_is_found(line: str, words: str) -> None:
    found = [text for use in uses(line, "a.py") if (text := missing(use, listed()))]
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize(("line", "words"), [("xp.asnumpy(a)", "no cupy.asnumpy"), ("xp.sum(a, ddof=1)", "no ddof=")])
def test_a_name_or_keyword_that_numpy_lacks_is_found(line: str, words: str) -> None:
    found = [text for use in uses(line, "a.py") if (text := missing_in_numpy(use))]
    assert len(found) == 1 and words in found[0], found


def test_the_cupy_that_is_installed_has_what_is_used(tmp_path: Path) -> None:
    packages = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
    versions = [d.version for name in packages for d in importlib.metadata.distributions(name=name)]
    if not versions:
        pytest.skip("CuPy is not installed: compared with the committed list only")
    path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not place.endswith("strict")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, str(ROOT / "tests" / "list_cupy.py"), str(tmp_path / "names.txt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = listed(tmp_path / "names.txt")
    assert [text for use in EVERY_USE if (text := missing(use, found))] == []
    if f"version {versions[0]}" in NAMES.read_text(encoding="utf-8"):
        assert found == listed(), "tests/cupy_names.txt is not what tests/list_cupy.py makes of this CuPy"
