"""A save that is killed before each of its file operations in turn: does the checkpoint before still load?

python tests/jobs/checkpoint_moments.py DIRECTORY

One rank. A child saves, and kills itself before its k-th file operation, for k = 1, 2, ... until a save comes through.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_recipes import Arrays, differences, state_of

import minizero as mz
from minizero import functional as F
from minizero import nn

EVENTS = ("open", "os.", "shutil.")
root = Path(sys.argv[1])
fsync = os.fsync


def fresh() -> mz.Engine:
    return mz.Zero2(nn.MLP([5, 4, 3]), mz.Adam(0.1))


def step(engine: mz.Engine) -> None:
    engine.backward(F.cross_entropy(engine(np.ones((2, 5), "float32") * (engine.steps + 1)), np.array([0, 2])))
    engine.step()


def killed(moment: int, action: Callable[[], Any]) -> bool:
    """Do it in a child that is killed before its file operation number `moment`; was it?"""
    child = os.fork()
    if child == 0:
        left = [moment]

        def count(event: str) -> None:
            if event.startswith(EVENTS):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        def counted(number: Any) -> None:
            count("os.fsync")  # the one that Python does not tell of
            fsync(number)

        os.fsync = counted  # type: ignore[assignment]
        sys.addaudithook(lambda event, args: count(event))
        action()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the save of moment {moment} failed: {status}"
    return status != 0


def saves_survive(title: str, prepare: Callable[[Path], None], steps: int, keep_last: int | None) -> None:
    """Kill a save after `steps` steps at every moment; what loads must be what was there, or what was being saved."""
    engine, states, moment = fresh(), {}, 0
    for number in range(4):
        states[number] = state_of(engine)
        if number == steps:
            saver: Arrays = states[number]
        step(engine)
    seen = set()
    while True:
        moment += 1
        where = root / title / str(moment)
        prepare(where)
        before = fresh()
        extra = before.load(where)
        engine = fresh()
        for _ in range(steps):
            step(engine)
        dead = killed(moment, lambda w=where, e=engine: e.save(w, "new", keep_last))  # type: ignore[misc]
        for _ in range(2):  # what a killed save has left must not disturb the next one, also not if that is killed
            after = fresh()
            said = after.load(where)
            seen.add(said)
            assert said in (extra, "new"), f"{title}, moment {moment}: {said}"
            truth = saver if said == "new" else states[before.steps]
            assert not differences(state_of(after), truth), f"{title}, moment {moment}: the state is torn"
            killed(3, lambda w=where, e=engine: e.save(w, "new", keep_last))  # type: ignore[misc]
        engine.save(where, "last", keep_last)
        assert fresh().load(where) == "last"
        hidden = [p.name for p in where.iterdir() if p.name.startswith(".")]
        assert not hidden, f"{title}, moment {moment}: a later save left {hidden}"
        shutil.rmtree(where)
        if not dead:
            break
    assert moment > 15 and seen == {extra, "new"}, f"{title}: only {moment} moments, and only {seen} was loaded"
    print(title, moment - 1, flush=True)


def older(where: Path) -> None:
    """Checkpoints of steps 1 and 2."""
    engine = fresh()
    for _ in range(2):
        step(engine)
        engine.save(where, "old")


def same(where: Path) -> None:
    """Checkpoints of steps 1, 2 and 3; 3 is what is saved again."""
    older(where)
    engine = fresh()
    engine.load(where)
    step(engine)
    engine.save(where, "old")


saves_survive("a new step", older, 3, None)
saves_survive("the same step again", same, 3, None)
saves_survive("older ones are removed", older, 3, 1)
