"""Lesson 00: what does one parameter cost?

    python lessons/00_autograd.py

One process, no messages. A Tensor remembers how it was made, backward walks that memory once, Adam updates the
weights, and at the end each array is asked for its bytes: 12 per parameter, of which 8 are Adam's.
"""

import numpy as np

import common
import minizero as mz
from minizero import functional as F
from minizero import nn
from minizero.autograd import Node, Tensor
from minizero.backend import bfloat16, xp
from minizero.optim import State


def train(task: common.Task, report: common.Report) -> tuple[nn.Module, list[State]]:
    model, adam = task.model(), mz.Adam(lr=task.lr)
    model.materialise()
    states = [adam.init(p.data.reshape(-1)) for p in model.parameters()]  # zeros: no gradient was seen yet
    for step, ((x, y),) in enumerate(report.steps(model, "Adam"), start=1):
        for p in model.parameters():
            p.grad = None  # backward adds to what is there
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        report.loss(loss, len(y))
        report.at_rest()
        for p, state in zip(model.parameters(), states, strict=True):
            assert p.grad is not None
            p.grad = p.grad.astype(p.dtype)  # computed in float32, kept like the weight
            adam.update(step, p.data.reshape(-1), p.grad.reshape(-1), state)
    return model, states


def graph(report: common.Report) -> None:
    """A small expression, the order in which backward visits its nodes, and its gradients, also by hand."""
    a, b, c = (Tensor(xp.asarray(number, "float32"), requires_grad=True) for number in (2.0, -3.0, 10.0))
    loss = F.relu(a * b + c) * a
    nodes, todo = set[Node](), [loss.node]
    while todo:
        if (node := todo.pop()) and node not in nodes:
            nodes.add(node)
            todo.extend(target for target in node.targets if isinstance(target, Node))
    order = [node.name for node in sorted(nodes, key=lambda node: node.number, reverse=True)]
    value = loss.item()
    loss.backward()
    found = [float(x.grad) for x in (a, b, c) if x.grad is not None]
    by_hand = [2 * 2 * -3 + 10.0, 2 * 2.0, 2.0]  # of L = a(ab + c): 2ab + c, a * a, a
    report.facts["graph"] = {"value": value, "order": order, "gradients": found, "by_hand": by_hand}
    report.print(f"L = relu(a * b + c) * a is {value:g} where a, b, c = 2, -3, 10. Backward visits {', '.join(order)}.")
    report.verdict(f"dL/da, dL/db, dL/dc are {found}, as by hand", found == by_hand, f"by hand {by_hand}")


def gradient_check(report: common.Report) -> None:
    """Backward through a small network, against (loss(w + h) - loss(w - h)) / 2h for each of its weights w."""
    model, x, y = nn.MLP([3, 5, 4], seed=1, dtype="float64"), np.eye(3), np.array([0, 3, 1])
    F.cross_entropy(model(x), y).backward()
    worst, h = 0.0, 1e-6
    for p in model.parameters():
        for place in np.ndindex(p.shape):
            slope, before = 0.0, float(p.data[place])
            for side in (1, -1):
                p.data[place] = before + side * h
                slope += side * F.cross_entropy(model(x), y).item() / (2 * h)
            p.data[place] = before
            assert p.grad is not None
            worst = max(worst, abs(slope - float(p.grad[place])))
    report.facts["gradient_error"] = worst
    report.verdict("backward agrees with finite differences", worst < 1e-8, f"largest difference ≈ {worst:.0e}")


def bill(model: nn.Module, states: list[State], report: common.Report) -> None:
    """Ask each array for its bytes."""
    parameters = model.parameters()
    arrays = {"weights": [p.data for p in parameters], "gradients": [p.grad for p in parameters if p.grad is not None]}
    arrays |= {f"optimizer, {key}": [state[key] for state in states] for key in states[0]}
    arrays["total"] = [array for group in arrays.values() for array in group]
    count = sum(p.size for p in parameters)
    each = {what: sum(array.nbytes for array in group) / count for what, group in arrays.items()}
    report.facts.update(parameters=count, bytes_per_parameter=each)
    report.print(f"\nThe bill of {count:,} parameters, in bytes per parameter")
    for what, size in each.items():
        report.print(f"{what:28}{size:6.2f}   at 13 billion {13 * size:8.2f} GB")


def small_steps(report: common.Report) -> None:
    """A weight of 1.0, and ten updates by Adam that should move it by 0.001 each."""
    one = xp.ones(1, bfloat16)
    total = float((one + xp.asarray([0.001], bfloat16))[0])
    report.print(f"\nIn bfloat16, 1.0 + 0.001 = {total}. A weight of 1.0 after ten updates at lr 0.001:")
    moved = {}
    for master in (False, True):
        weight, adam = one.copy(), mz.Adam(lr=1e-3, master=master)
        state = adam.init(weight)
        for step in range(1, 11):
            adam.update(step, weight, xp.ones(1, bfloat16), state)
        moved[str(master)] = float(weight[0])
        size = weight.nbytes + weight.nbytes + sum(array.nbytes for array in state.values())
        report.print(f"Adam(master={master!s:5}): {float(weight[0]):.4f}, at {size} bytes per parameter")
    report.facts["small_steps"] = {"sum": total, "weight": moved}


def main() -> None:
    task = common.Task(__doc__, micro_batches=False)
    report = common.Report(__file__, task)
    graph(report)
    gradient_check(report)
    report.print()
    bill(*train(task, report), report)
    small_steps(report)
    report.end()


if __name__ == "__main__":
    main()
