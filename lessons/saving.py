"""Where do --save DIR and --resume DIR put and find each stage's checkpoints?

DIR/ZeRO-2/step-50, DIR/ZeRO-2/step-60     what --save writes, every ten steps and at the end, and keeps: two a stage
--resume DIR                               each stage goes on with its own; one that has none starts anew
--resume DIR/DP                            all stages go on with this one: any stage loads what any other saved
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import minizero as mz
from minizero.comm import MPI

NAME = re.compile(r"step-\d+")
EVERY = 10  # steps between two saves
DATA = ("model", "batch", "micro_batches", "seed", "lr")  # the options that say what the next step would have been


class Saver:
    """Saves and resumes the trainings of one lesson. All methods are collective."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.save: str | None = getattr(options, "save", None)
        self.resume: str | None = getattr(options, "resume", None)

    def start(self, engine: mz.Engine, name: str) -> Path | None:
        """Bring `engine` to where its training was saved, and return the checkpoint; None: it starts anew.

        At least two steps are left to do, or there would be nothing to measure. SystemExit where that cannot be.
        """
        if not self.resume:
            return None
        root = Path(self.resume)
        root = root / name if (root / name).is_dir() else root
        found = {int(f.name[5:]): f for f in (root, *root.glob("step-*")) if NAME.fullmatch(f.name) and f.is_dir()}
        most = self.options.steps - 2
        early = [steps for steps in found if steps <= most]
        if not found and any(root.glob("*/step-*")):
            return None  # other stages have saved there
        if not early:
            refuse(f"--resume: {root} was saved after {min(found)} steps: --steps must be {min(found) + 2} or more"
                   if found else f"--resume: there is no checkpoint in {root}")  # fmt: skip
        folder = found[max(early)]
        try:
            was = engine.load(folder)
        except mz.CheckpointError as error:
            refuse(str(error))
        here, was = self._data(), was if isinstance(was, dict) else {}
        changed = [f"--{key.replace('_', '-')} {was.get(key)}" for key in DATA if was.get(key) != here[key]]
        if changed:
            refuse(f"--resume: {folder} was saved with {', '.join(changed)}: what goes on must be the same training")
        return folder

    def after(self, engine: mz.Engine) -> bool:
        """After a step: is it time to save?"""
        return bool(self.save) and (engine.steps % EVERY == 0 or engine.steps >= self.options.steps)

    def put(self, engine: mz.Engine, name: str) -> Path:
        """Save."""
        try:
            return engine.save(Path(self.save or "") / name, self._data(), keep_last=2)
        except mz.CheckpointError as error:
            refuse(str(error))

    def _data(self) -> dict[str, Any]:
        return {key: getattr(self.options, key) for key in DATA}


def refuse(reason: str) -> NoReturn:
    """End on all ranks with one line from rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"\n{reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)
