"""The cases about ranks that differ: each function is a claim, and says so when it holds on every rank.

`odd` is the rank that does something else than the others.
"""

import contextlib
import itertools
import multiprocessing
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn, ring
from minizero.backend import Array, to_host, xp
from minizero.nn import Parameter, constant

world = mz.Communicator()
N, rank = world.size, world.rank
odd = 1
Stage = type[mz.Engine]
Weights = dict[str, "np.ndarray[Any, Any]"]
WHOLE = (mz.DataParallel, mz.Zero1, mz.Zero2)  # the stages that gather nothing in a forward


def all_raise(
    what: str, do: Callable[[mz.Communicator], Any], *words: str, kind: type[Exception] = mz.CollectiveError
) -> None:
    """Every rank raises, soon, with all `words`; a CollectiveError also names two neighbours, of which `odd` is one."""
    comm = world.split(0)  # of its own, as the error breaks it
    start = time.monotonic()
    try:
        do(comm)
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"{what}: no error on rank {rank} of {N}")
    took = time.monotonic() - start
    assert took < 8, f"{what}: {took:.1f} s until the error on rank {rank}"
    missing = [word for word in words if word not in text]
    assert not missing, f"{what}, rank {rank}: {missing} not in: {text}"
    if kind is mz.CollectiveError:
        named = [int(number) for number in re.findall(r"rank (\d+)", text)]
        assert len(named) == 2 and odd in named and (named[0] + 1) % N == named[1], f"{what}, rank {rank}: {text}"


def same(got: Weights, right: Weights, what: str) -> None:
    for name, array in right.items():
        unsigned = f"u{array.dtype.itemsize}"
        assert (got[name].view(unsigned) == array.view(unsigned)).all(), f"{what}, rank {rank}: {name} has other bits"


# Case 22: what ends nothing. (What does end a rank has a job of its own: cases_ranks_leave.py.)


def still_together(after: str) -> None:
    total = ring.all_reduce(world, xp.ones(2 * N))
    assert bool((total == N).all()), f"after {after}: {total}"


def a_caught_system_exit_ends_nothing() -> None:
    if rank == odd:
        ways: list[Any] = [lambda: sys.exit(3), exit, quit]
        for leave in ways:
            with contextlib.suppress(SystemExit):
                leave()
        with contextlib.suppress(BaseException):
            raise SystemExit("the reason")
    still_together("a caught SystemExit")


def a_system_exit_in_a_thread_ends_the_thread_and_nothing_else() -> None:
    if rank == odd:
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
    still_together("sys.exit in a thread")


def a_caught_interrupt_ends_nothing() -> None:
    if rank == odd:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)
    still_together("a caught Ctrl-C")


def double(x: int) -> int:
    return 2 * x


def worker_processes_come_and_go_and_are_not_taken_for_the_rank() -> None:
    """As a data loader has them, forked off a rank: what they inherit must not say that the rank has ended."""
    if rank == odd:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(double, [1, 2, 3]) == [2, 4, 6]
    still_together("the end of worker processes")


# Case 23

COLLECTIVES: dict[str, Callable[[mz.Communicator, Array], Any]] = {
    "all_reduce": ring.all_reduce,
    "reduce_scatter": ring.reduce_scatter,
    "all_gather": ring.all_gather,
    "broadcast": ring.broadcast,
}


def ranks_in_different_collectives_all_raise_and_name_both() -> None:
    for one, other in itertools.combinations(COLLECTIVES, 2):
        for count in (2, 1 << 15):  # what MPI takes at once, and what it keeps until the other side takes it

            def do(comm: mz.Communicator, one: str = one, other: str = other, count: int = count) -> None:
                COLLECTIVES[other if rank == odd else one](comm, xp.ones(N * count, np.uint32))

            all_raise(f"{one} and {other}", do, f"{one} (uint32)", f"{other} (uint32)", "the same collectives")
    for name, collective in COLLECTIVES.items():
        all_raise(
            f"{name} and split",
            lambda comm: comm.split(0) if rank == odd else collective(comm, xp.ones(N)),  # noqa: B023
            f"{name} (",
            "control (uint8)",
        )


def ranks_with_different_sizes_all_raise_and_name_both() -> None:
    for name, collective in COLLECTIVES.items():
        for usual, unusual in ((3, 4), (4, 3), (0, 1), (1, 0), (20_000, 1), (1, 20_000)):

            def do(comm: mz.Communicator, usual: int = usual, unusual: int = unusual) -> None:
                collective(comm, xp.ones(N * (unusual if rank == odd else usual), np.uint32))  # noqa: B023

            sizes = f" {4 * usual}", f" {4 * unusual}", f"{name} (uint32)", "differ in size"
            all_raise(f"{name} of {usual} and {unusual}", do, *sizes)


def models_whose_units_differ_in_size_or_dtype_are_refused_when_they_are_wrapped() -> None:
    """Nothing is broken by that: the ranks may go on together."""
    models: dict[str, Callable[[], nn.Module]] = {
        "size": lambda: nn.MLP([6, 9 if rank == odd else 8, 3]),
        "sizes that add up to the same": lambda: nn.MLP([6, 4, 6] if rank == odd else [4, 6, 4]),
        "dtype": lambda: nn.MLP([6, 8, 3], dtype="float64" if rank == odd else "float32"),
        "16 bits": lambda: nn.MLP([6, 8, 3], dtype="bfloat16" if rank == odd else "float32"),
        "one unit more": lambda: nn.MLP([6, 8, 8, 3] if rank == odd else [6, 8, 3]),
    }
    for what, make in models.items():
        for stage in mz.STAGES:

            def do(comm: mz.Communicator, make: Callable[[], nn.Module] = make, stage: Stage = stage) -> None:
                try:
                    stage(make(), mz.SGD(0.1), comm)
                finally:
                    assert float(ring.all_reduce(comm, xp.ones(N))[0]) == N

            words = f"ranks [{odd}] wrap another model than rank 0", f"Here on rank {rank}: {stage.__name__}"
            all_raise(f"{what}, {stage.__name__}", do, *words, kind=ValueError)


# Point by point through a training step.


class Net(nn.Module):
    """Three layers of one size, a, b, c. `way` says which are used, in this order; no gradient goes back past a "."."""

    def __init__(self) -> None:
        self.seed, self.way = 5, "abc"
        self.a, self.b, self.c = (nn.Linear(4, 4, dtype="float64") for _ in "abc")

    def forward(self, x: Any) -> mz.Tensor:
        for layer in self.way:
            x = x.detach() if layer == "." else F.tanh(getattr(self, layer)(x))
        return x


def batch(member: int, step: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng([member, step])
    return generator.standard_normal((3, 4)), generator.integers(0, 4, 3)


def one_step(stage: Stage, way: str, comm: mz.Communicator) -> Weights:
    """The weights after one step of SGD, lr 1, in which `odd` goes another way through the model."""
    engine = stage(Net(), mz.SGD(1.0), comm)
    net: Any = engine.model
    net.way = way if rank == odd else "abc"
    x, y = batch(rank)
    engine.backward(F.cross_entropy(engine(x), y))
    engine.step()
    net.way = "abc"
    return engine.gather_parameters()


def true_step(way: str) -> Weights:
    """The same, computed by one process: each rank's gradient counts 1/N; what a rank did not use has gradient 0."""
    found: Weights = {}
    for member in range(N):
        net = Net()
        net.way = way if member == odd else "abc"
        x, y = batch(member)
        F.cross_entropy(net(x), y).backward()
        for name, parameter in net.named_parameters():
            found.setdefault(name, parameter.numpy().copy())
            if parameter.grad is not None:
                found[name] -= to_host(parameter.grad) / N
    return found


def a_rank_that_goes_another_way_through_the_model_counts_with_the_gradient_of_that_way() -> None:
    """Under DP, ZeRO-1 and 2: in another order, past a layer, or without a gradient for the first layers."""
    for way in ("cba", "bac", "ac", "bc", "ab", "aabc", "ab.c", "a.bc"):
        right, first = true_step(way), one_step(mz.DataParallel, way, world)
        for name, array in right.items():
            assert np.allclose(first[name], array, rtol=0, atol=1e-14), f"{way}, rank {rank}: {name} is wrong"
        for stage in WHOLE[1:]:
            same(one_step(stage, way, world), first, f"{way}, {stage.__name__}")


def a_rank_that_goes_another_way_under_zero3_stops_all_ranks_and_both_ways_are_named() -> None:
    """All layers have one size: without names in the messages, the wrong weights would go unnoticed."""
    seen = {
        "cba": ("all_gather of a", "all_gather of c"),
        "acb": ("all_gather of b", "all_gather of c"),
        "ac": ("all_gather of b", "all_gather of c"),
        "bc": ("all_gather of a", "all_gather of b"),
        "ab": ("all_gather of c", "reduce_scatter of c"),  # there, backward has begun: with c, whose gradient is 0
        "aabc": ("all_gather of a", "all_gather of b"),
        "ab.c": ("all_gather of b", "reduce_scatter of b"),
        "a.bc": ("all_gather of a", "reduce_scatter of a"),
    }
    for way, words in seen.items():
        all_raise(f"ZeRO-3, {way}", lambda comm: one_step(mz.Zero3, way, comm), *words)  # noqa: B023


def train(stage: Stage, comm: mz.Communicator, extra: Callable[[mz.Engine, int], Any]) -> Weights:
    """The weights after three steps; `extra` is done between the second backward and its step."""
    engine = stage(Net(), mz.Adam(0.1), comm)
    for step in range(3):
        x, y = batch(rank, step)
        engine.backward(F.cross_entropy(engine(x), y))
        if step == 1:
            extra(engine, rank)
        engine.step()
    return engine.gather_parameters()


def evaluate(engine: mz.Engine, rank: int) -> None:
    if rank == odd:
        with mz.no_grad():
            engine(batch(9)[0])


def look(engine: mz.Engine, rank: int) -> None:
    if rank == odd:
        engine.gather_parameters()


def an_evaluation_or_a_look_at_the_weights_by_one_rank_alone_disturbs_nobody_or_stops_all() -> None:
    """The weights are all there but under ZeRO-3, where both are collective."""
    for stage in WHOLE:
        right = train(stage, world, lambda engine, rank: None)
        for extra in (evaluate, look):
            same(train(stage, world, extra), right, f"{stage.__name__}, {extra.__name__}")
    words = "all_gather of a", "control"  # the others' step, and the forward that is the evaluation
    all_raise("ZeRO-3, evaluation by one", lambda comm: train(mz.Zero3, comm, evaluate), *words)
    words = "gather_parameters of a", "control"
    all_raise("ZeRO-3, a look by one", lambda comm: train(mz.Zero3, comm, look), *words)


def a_rank_that_clips_steps_or_forgets_alone_stops_all() -> None:
    def clips(engine: mz.Engine) -> None:
        if rank == odd:
            engine.clip_grad_norm(1.0)
        engine.step()

    def steps(engine: mz.Engine) -> None:
        if rank == odd:
            engine.step()

    def starts_again(engine: mz.Engine) -> None:
        if rank == odd:
            engine.zero_grad()
        else:
            engine.step()

    alone: dict[str, Callable[[mz.Engine], None]] = {"clips": clips, "steps": steps, "starts again": starts_again}
    for stage in mz.STAGES:
        for what, extra in alone.items():

            def do(comm: mz.Communicator, stage: Stage = stage, extra: Callable[[mz.Engine], None] = extra) -> None:
                engine = stage(Net(), mz.SGD(0.1), comm)
                x, y = batch(rank)
                for _ in range(2):
                    engine.backward(F.cross_entropy(engine(x), y))
                    extra(engine)
                engine.gather_parameters()
                ring.broadcast(comm, xp.ones(N))

            all_raise(f"{stage.__name__}, one rank {what}", do, "control")


# Case 24


class Line(nn.Module):
    """x . w, with w = 0 at first: all numbers below are exact."""

    def __init__(self) -> None:
        self.w = Parameter((2,), constant(0))

    def forward(self, x: Any) -> mz.Tensor:
        return F.mul(x, self.w).sum(axis=1)


def example(number: int) -> tuple[list[float], float]:
    return [1, number], number + 1


def slice_of(numbers: range) -> tuple[Any, Any]:
    """Examples as x (n, 2) and y (n,), also where there are none."""
    made = [example(number) for number in numbers]
    x = np.array([x for x, _ in made], np.float32).reshape(-1, 2)
    return x, np.array([y for _, y in made], np.float32)


def slices_of_any_size_give_the_mean_over_all_examples() -> None:
    """Eight examples: the gradient of the mean of (x . w - y)² at w = 0 is (-9, -42), and so w becomes (4.5, 21)."""
    for sizes in ([3, 5], [5, 3], [8, 0], [0, 8], [1, 7]):
        starts = [0, sizes[0], *[8] * (N - 1)]  # any other rank has none
        numbers = range(starts[rank], starts[rank + 1])
        x, y = slice_of(numbers)
        for stage in mz.STAGES:
            engine = stage(Line(), mz.SGD(0.5), world)
            loss = F.mse_loss(engine(x), y)
            assert len(numbers) or loss.item() == 0, f"the loss of no examples is {loss.item()}"
            engine.backward(loss, examples=len(numbers))
            engine.step()
            w = engine.gather_parameters()["w"].tolist()
            assert w == [4.5, 21.0], f"{stage.__name__}, slices of {sizes}, rank {rank} of {N}: w is {w}"


def fewer_examples_than_ranks_give_the_mean_over_these() -> None:
    """Only the last rank has one: example 3, whose gradient is (-8, -24)."""
    x, y = slice_of(range(3, 4 if rank == N - 1 else 3))
    for stage in mz.STAGES:
        engine = stage(Line(), mz.SGD(0.5), world)
        engine.backward(F.mse_loss(engine(x), y), examples=len(y))
        norm = engine.clip_grad_norm(1000)
        assert abs(norm - 640**0.5) < 1e-12, f"{stage.__name__}, rank {rank}: the norm is {norm}"
        engine.step()
        w = engine.gather_parameters()["w"].tolist()
        assert w == [4.0, 12.0], f"{stage.__name__}, rank {rank} of {N}: w is {w}"


def pooled(groups: list[range], lr: float) -> "np.ndarray[Any, Any]":
    """w after one step of SGD for each group of examples, in float64 on one process."""
    w = np.zeros(2)
    for numbers in groups:
        x, y = (array.astype(np.float64) for array in slice_of(numbers))
        w -= lr * 2 * ((x @ w - y) @ x) / len(numbers)
    return w


def seven_batches_over_fewer_ranks_train_as_their_pools_do() -> None:
    """Each rank takes every N-th; who has none left in the last round comes with an empty one."""
    batches = [range(2 * i, 2 * i + 2) for i in range(7)]
    rounds = [range(2 * i, min(2 * (i + N), 14)) for i in range(0, 7, N)]
    bits: set[bytes] = set()
    for stage in mz.STAGES:
        engine = stage(Line(), mz.SGD(0.001), world)
        for at in range(0, 7, N):
            mine = batches[at + rank] if at + rank < 7 else range(0)
            x, y = slice_of(mine)
            engine.backward(F.mse_loss(engine(x), y), examples=len(mine))
            engine.step()
        w = engine.gather_parameters()["w"]
        assert np.allclose(w, pooled(rounds, 0.001), rtol=1e-5), f"{stage.__name__}: {w}, {pooled(rounds, 0.001)}"
        bits.add(w.tobytes())
    assert len(bits) == 1, f"the stages differ: {[np.frombuffer(each, np.float32) for each in bits]}"


def seven_batches_as_micro_batches_of_one_step_need_as_many_calls_on_every_rank() -> None:
    """Those who have fewer add an empty one. The mean over all 14 examples is what one process gets."""
    for stage in mz.STAGES:
        engine = stage(Line(), mz.SGD(0.001), world)
        for at in range(0, 7, N):
            x, y = slice_of(range(2 * (at + rank), 2 * (at + rank) + 2) if at + rank < 7 else range(0))
            engine.backward(F.mse_loss(engine(x), y), examples=len(y))
        engine.step()
        w = engine.gather_parameters()["w"]
        assert np.allclose(w, pooled([range(14)], 0.001), rtol=1e-5), f"{stage.__name__}: {w}"


# Relatives


def ranks_may_do_different_things_at_the_same_time_where_they_share_no_communicator() -> None:
    mine = world.split(rank % 2)
    assert ring.all_gather(mine, np.full(mine.size, rank)).tolist() == list(range(rank % 2, N, 2))
    for _ in range(3 if rank % 2 else 1):
        total = ring.all_reduce(mine, xp.ones(mine.size)) if rank % 2 else ring.broadcast(mine, xp.ones(mine.size))
    assert total.tolist() == [mine.size if rank % 2 else 1] * mine.size


CLAIMS = [claim for name, claim in list(globals().items()) if isinstance(claim, FunctionType) and name.count("_") > 3]
if __name__ == "__main__":
    for claim in CLAIMS:
        try:
            claim()
        except BaseException as error:
            raise AssertionError(f"{claim.__name__} does not hold on rank {rank} of {N}: {error!r}") from error
        if rank == 0:
            sys.stdout.write(f"ok {claim.__name__}\n")
