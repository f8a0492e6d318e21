"""Where do --save DIR and --resume DIR put and find each stage's checkpoints?

DIR/ZeRO-2/step-50, DIR/ZeRO-2/step-60     what --save writes, every ten steps and at the end, and keeps: two a stage
--resume DIR                               each stage goes on with its own checkpoint, or else with the first stage's
--resume DIR/DP, --resume DIR/DP/step-50   all stages go on with this one: any stage loads what any other saved
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import minizero as mz
from minizero.comm import MPI

EVERY = 10  # steps between two saves
DATA = ("model", "batch", "micro_batches", "seed", "lr")  # the options that say what the next step would have been


class Saver:
    """Saves and resumes the trainings of one lesson. All methods are collective; rank 0 looks at the directories."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.save: str | None = getattr(options, "save", None)
        self.resume: str | None = getattr(options, "resume", None)
        self.data = {key: getattr(options, key, None) for key in DATA}

    def start(self, engine: mz.Engine, name: str) -> Path | None:
        """Bring `engine` to where its training was saved, and return the checkpoint; None without --resume.

        At least two steps are left to do, or there would be nothing to measure. SystemExit where that cannot be.
        """
        self.data["ranks"] = engine.comm.size
        found = self._look(name, engine.comm.size) if engine.comm.rank == 0 else None
        folder, refusal = engine.comm.mpi.bcast(found)
        if refusal:
            refuse(refusal)
        if folder:
            try:
                engine.load(folder)
            except mz.CheckpointError as error:
                refuse(str(error))
        return folder

    def after(self, engine: mz.Engine, name: str) -> str:
        """After a step: save, if it is time to. Returns where, in words."""
        if not self.save or (engine.steps % EVERY and engine.steps < self.options.steps):
            return ""
        try:
            return f"   saved in {engine.save(Path(self.save) / name, self.data, keep_last=2)}"
        except mz.CheckpointError as error:
            refuse(str(error))

    def _look(self, name: str, ranks: int) -> tuple[Path | None, str]:
        """The checkpoint to go on with, if any; and why not."""
        if self.save:
            try:
                (Path(self.save) / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return None, f"--save: {error}"
            here, back = Path(self.save).resolve(), Path(self.resume or "/").resolve()
            if saved_in(here / name) and here not in (back, *back.parents):  # they would be replaced
                return None, f"--save: {self.save} has checkpoints: --resume {self.save}, or save somewhere else"
        if not self.resume:
            return None, ""
        root, most = Path(self.resume), self.options.steps - 2
        own = {steps: f for steps, f in saved_in(root / name).items() if extra(f).get("ranks") == ranks}
        first = next((each for each in map(saved_in, sorted(root.glob("*/"))) if each), {})
        all_ = saved_in(root) or own or first
        fit = [steps for steps in all_ if steps <= most]
        if not all_:
            return None, f"--resume: there is no checkpoint in {root}"
        if not fit:
            least = min(all_)
            return None, f"--resume: {all_[least]} was saved after {least} steps: --steps must be {least + 2} or more"
        folder = all_[max(fit)]
        was = extra(folder)
        changed = [f"--{key.replace('_', '-')} {was.get(key)}" for key in DATA if was.get(key) != self.data[key]]
        if changed:
            return None, f"--resume: {folder} was saved with {', '.join(changed)}: go on with the same training"
        return folder, ""


def saved_in(root: Path) -> dict[int, Path]:
    """The checkpoints that `root` has, or is, by their number of steps."""
    return {
        int(f.name[5:]): f for f in (root, *root.glob("step-*")) if re.fullmatch(r"step-\d+", f.name) and f.is_dir()
    }


def extra(folder: Path) -> dict[str, Any]:
    """What was saved beside weights and moments, if it can be read: `load` says why not."""
    try:
        found = json.loads((folder / "state.json").read_text())["extra"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    return found if isinstance(found, dict) else {}


def refuse(reason: str) -> NoReturn:
    """End on all ranks with one line from rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"\n{reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)
