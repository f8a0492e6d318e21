"""What is an allocation for, by the lines of code that asked for it?

    ... user.py, engine.py Engine.backward, autograd.py backward, functional.py linear       -> temporary
    ... user.py, nn.py Module.__call__, functional.py relu                                   -> activations
    ... user.py, engine.py Engine.step, optim.py Optimizer.init                              -> optimizer
    ... user.py, zero3.py Zero3.gather, flat.py Unit.blank                                   -> vector: of a unit
    ... user.py, pipeline.py Pipeline.receive_activation, point.py receive                   -> activations

The innermost line inside this package decides, and whether a backward runs. What a unit's vector is for, its engine
knows: it may keep it, as weights or gradients, or it is passing.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from pathlib import Path

from . import allocator

HERE = str(Path(__file__).parent)
OPERATIONS = {f"{HERE}/{name}.py" for name in ("functional", "operation", "nn", "autograd", "tensor_parallel")}


class Source:
    """Knows which function each line of this package belongs to."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[list[int], list[str]]] = {}
        self.terms: dict[allocator.Stack, str] = {}

    def function(self, file: str, line: int) -> str:
        if file not in self.files:
            found: list[tuple[int, str]] = [(0, "")]
            self._collect(ast.parse(Path(file).read_text()), "", found)
            self.files[file] = [start for start, _ in found], [name for _, name in found]
        starts, names = self.files[file]
        return names[bisect_right(starts, line) - 1]

    def _collect(self, node: ast.AST, path: str, found: list[tuple[int, str]]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{path}.{child.name}".strip(".")
                found.append((child.lineno, inner))
            self._collect(child, inner, found)
            if inner != path:
                found.append(((child.end_lineno or 0) + 1, path))  # type: ignore[attr-defined]

    def term(self, stack: allocator.Stack) -> str:
        """What a block is for, by the stack that asked for it; "vector" for a unit's, which an engine may hold."""
        if stack not in self.terms:
            self.terms[stack] = self._look(stack)
        return self.terms[stack]

    def _look(self, stack: allocator.Stack) -> str:
        lines = [(frame.filename, frame.lineno) for frame in reversed(stack)]
        ours = [(Path(file).stem, self.function(file, line)) for file, line in lines if file.startswith(HERE)]
        if not ours:
            return "other"
        file, function = ours[0]
        if file == "optim":
            return "optimizer" if function == "Optimizer.init" else "temporary"  # which also asks for scratch
        if file == "nn" and function == "Module.materialise":  # of a model without engine
            return "weights"
        if f"{HERE}/{file}.py" in OPERATIONS:
            passing = function == "value" or any(pair == ("autograd", "backward") for pair in ours)
            return "temporary" if passing else "activations"
        if ("pipeline", "Pipeline.receive_activation") in ours:
            return "activations"
        return "temporary" if file in ("comm", "point", "agreement", "pipeline") else "vector"


term_of = Source().term
