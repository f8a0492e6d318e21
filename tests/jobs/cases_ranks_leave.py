"""One rank leaves the training in one of many ways; the others notice in their next collective, and the job ends.

cases_ranks_leave.py how who stage
"""

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn

how, who, stage = sys.argv[1], int(sys.argv[2]), getattr(mz, sys.argv[3])


def fail() -> None:
    raise KeyError("the reason")


async def fail_later() -> None:
    await asyncio.sleep(0)
    fail()


def from_an_except() -> None:
    try:
        fail()
    except KeyError:
        sys.exit(3)


def from_a_finally() -> None:
    try:
        fail()
    finally:
        sys.exit(3)


def with_a_hook_of_its_own() -> None:
    """As libraries for prettier tracebacks install."""
    sys.excepthook = lambda *_: print("a prettier traceback", file=sys.stderr)
    fail()


def with_stdout_closed() -> None:
    sys.stdout.close()
    fail()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def unspeakably() -> None:
    raise UnspeakableError


def in_a_thread() -> None:
    threading.Thread(target=fail).start()
    time.sleep(60)


def on_a_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def raise_system_exit() -> None:
    raise SystemExit("the reason")


LEAVE: dict[str, Any] = {
    "raises": fail,
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "raise SystemExit": raise_system_exit,
    "exit()": lambda: exit(),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": lambda: on_a_signal(signal.SIGKILL),
    "SIGTERM": lambda: on_a_signal(signal.SIGTERM),
    "SIGINT": lambda: on_a_signal(signal.SIGINT),
    "Ctrl-C": lambda: time.sleep(60),
    "except": from_an_except,
    "finally": from_a_finally,
    "hook": with_a_hook_of_its_own,
    "stdout closed": with_stdout_closed,
    "unspeakable": unspeakably,
    "thread": in_a_thread,
    "pool": lambda: ThreadPoolExecutor().submit(fail).result(),
    "asyncio": lambda: asyncio.run(fail_later()),
}


def main() -> None:
    engine: mz.Engine = stage(nn.MLP([6, 8, 3], seed=1), mz.Adam(), mz.Communicator())
    generator = np.random.default_rng(engine.comm.rank)
    x, y = generator.standard_normal((4, 6), np.float32), generator.integers(0, 3, 4)
    for step in range(3):
        if step == 2 and how == "Ctrl-C" and engine.comm.rank != who:  # one is deaf to it, as if in a long call
            on_a_signal(signal.SIGINT)
        if step == 2 and engine.comm.rank == who and how != "at the end":
            os.write(1, f"leaving at {time.time()}\n".encode())
            if how == "too early":
                return
            LEAVE[how]()
            raise AssertionError(f"{how} has not ended this rank")
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    if how == "at the end" and engine.comm.rank == who:
        os.write(1, f"leaving at {time.time()}\n".encode())
        sys.exit(3)


main()
