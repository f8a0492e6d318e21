"""Would the checks notice? Faults are planted one by one, and the right verdicts must turn red, for the right stages.

    numbers   weights, optimizer state and padding against the oracle, bit by bit
    memory    bytes held, bytes alive, and who keeps which chunk
    traffic   bytes sent, by operation

"0" is DP, "1" to "3" are the ZeRO stages. A fault that turns nothing red is one that these checks cannot see.
"""

import json
import re
from functools import cache
from typing import TypeAlias

import pytest

from launch import ROOT, run_ranks

RED: TypeAlias = "dict[str, str]"  # verdict -> stages
Found: TypeAlias = "tuple[RED, dict[str, str]]"  # what turned red, and why


def red(numbers: str = "", memory: str = "", traffic: str = "") -> RED:
    return {"numbers": numbers, "memory": memory, "traffic": traffic}


GREEN = red()
ALL = "0123"
DIRECTION, BEFORE = "the ring runs the other way", "the mean over ranks is taken before the sum"

# By ranks. Three cannot tell the ring's direction, and dividing by 2, 4 or 8 is exact, before the sum or after it. So
# the order of additions is looked at with 5 and 8, the mean with 3 and 5; for all else 3 are enough, and faster.
EXPECTED = {
    3: {
        "none": GREEN,
        "the mean is never taken": red(numbers=ALL),
        "the mean is taken twice": red(numbers=ALL),
        BEFORE: red(numbers=ALL),
        DIRECTION: GREEN,
        "every rank reads the slice of rank 0": red(numbers=ALL),
        "only the last micro-batch counts": red(numbers=ALL),
        "uneven slices weigh the same": red(numbers=ALL),
        "what was reduced is also kept and counted again": red(numbers=ALL, memory=ALL),
        "a shared weight's gradient is counted twice": red(numbers=ALL),
        "an unused layer's gradient is whatever memory held": red(numbers=ALL),
        "ZeRO-1 in name only: whole state, and an all-gather for show": red(memory="1"),
        "ZeRO-2 all-reduces, then slices": red(traffic="2"),
        "ZeRO-2 all-reduces, and keeps it all": red(memory="2", traffic="2"),
        "ZeRO-3 in name only: it is ZeRO-2": red(memory="3", traffic="3"),
        "updated weights are not published": red(numbers="12", traffic="12"),
        "units stay gathered from forward to backward": red(memory="3", traffic="3"),
        "units stay gathered for good": red(numbers="3", memory="3", traffic="3"),
        "a closure keeps a view of a weight": red(memory="3"),
        "a closure keeps a bfloat16 weight as float32": red(memory=ALL),
        "bfloat16 gradients are held as float32": red(numbers=ALL, memory=ALL),
        "ranks start from their own seeds": red(numbers=ALL, traffic=ALL),
        "all ranks have the same noise": red(numbers=ALL),
        "padding is not zeroed": red(numbers=ALL),
        "padding counts in the norm": red(numbers=ALL),
        "the norm is taken before gradients are reduced": red(numbers=ALL),
        "the norm is that of the own chunk": red(numbers=ALL),
        "each rank clips by the norm of its own chunk, and asks nobody": red(numbers=ALL, traffic=ALL),
        "the norm adds up what all ranks hold, copies included": red(numbers="01"),
        "moments start anew in every step": red(numbers=ALL),
        "bias correction is always that of step 1": red(numbers=ALL),
        "bias correction counts units as steps": red(numbers=ALL),
        "frozen weights decay": red(numbers=ALL),
        "frozen weights are trained": red(numbers=ALL, memory=ALL, traffic=ALL),
    },
    5: {
        "none": GREEN,
        BEFORE: red(numbers=ALL),
        DIRECTION: red(numbers=ALL),
        "the ring adds to the wrong chunk": red(numbers=ALL),
        "rank r owns chunk r + 1, in ring and units": red(numbers=ALL, memory="123"),
        "ZeRO-1 updates chunk r + 1, consistently": red(memory="1"),
        "all units are reduced as one vector": red(numbers="0"),
        "units are reduced first to last": red(memory="23"),
        "reduce-scatter hands out a view": red(memory="23"),
        "weights are averaged, not gradients": red(numbers="0", traffic="0"),
        "gradients are never reduced in ZeRO-3": red(numbers="3", traffic="3"),
        "bfloat16 sums travel as float32": red(numbers=ALL, traffic=ALL),
    },
    8: {
        BEFORE: GREEN,
        DIRECTION: red(numbers=ALL),
    },
}
BLIND = {(3, DIRECTION), (8, BEFORE), (3, "none"), (5, "none")}
EACH = [(n, fault) for n, faults in EXPECTED.items() for fault in faults]


@cache
def run(n: int) -> dict[str, Found] | str:
    """All faults planted at `n` ranks, in one job: what turned red, and why. What went wrong, if the job failed."""
    job = ROOT / "tests" / "jobs" / "mutation_run.py"
    try:
        done = run_ranks(n, job, *EXPECTED[n], env={"MINIZERO_BACKEND": "numpy"}, timeout=400)
    except (AssertionError, TimeoutError) as error:
        return str(error)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"\n{'fault':64}{'numbers':9}{'memory':8}traffic      (N = {n})")
    for line in lines:
        print(f"{line['fault']:64}{line['numbers']:9}{line['memory']:8}{line['traffic']}")
    return {line["fault"]: (red(line["numbers"], line["memory"], line["traffic"]), line["why"]) for line in lines}


@pytest.mark.parametrize(("n", "fault"), EACH)
def test_the_right_verdicts_turn_red(n: int, fault: str) -> None:
    found = run(n)
    assert isinstance(found, dict), found
    reds, why = found[fault]
    assert reds == EXPECTED[n][fault], why


def test_every_fault_is_planted_and_seen_somewhere() -> None:
    written = re.findall(r'^@fault\("(.+)"\)', (ROOT / "tests/jobs/mutation_faults.py").read_text(), re.MULTILINE)
    assert len(written) > 40
    for fault in written:
        assert any(faults.get(fault, GREEN) != GREEN for faults in EXPECTED.values()), f"nothing notices: {fault}"
    assert {fault for _, fault in EACH} == {*written, "none"}
    assert {(n, fault) for n, fault in EACH if EXPECTED[n][fault] == GREEN} == BLIND
