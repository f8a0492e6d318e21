"""Do whole gradients and gathered weights die when they should? Each function without arguments is one claim.

mpirun -n 3 python tests/jobs/lifetime_vectors.py [claim ...]      # all, if none is named
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from contextlib import ExitStack
from typing import Any

import numpy as np
from lifetime_probe import before_each, drop_spare, live, of_size, peak, spare, watched

import minizero as mz
from minizero import autograd, nn
from minizero import functional as F
from minizero.autograd import Tensor
from minizero.flat import Unit
from minizero.nn import Parameter

WIDTH, LAYERS, BATCH = 192, 6, 2
LAYER = WIDTH * WIDTH + WIDTH  # elements of a layer, a multiple of the ranks here
VOCAB, CONTEXT = 29, 9
SMALL = 1 << 14  # bytes: more than all activations, and far less than a weight
comm = mz.Communicator()
here = f"rank {comm.rank}"


def mlp(layers: int = LAYERS, dtype: str = "float32") -> nn.MLP:
    return nn.MLP([WIDTH] * (layers + 1), dtype=dtype)


def gpt(tied: bool = False, dtype: str = "float32") -> nn.GPT:
    return nn.GPT(vocab=VOCAB, context=CONTEXT, width=48, heads=2, layers=2, tied=tied, dtype=dtype)


def batch(model: nn.Module) -> tuple[Any, Any]:
    generator = np.random.default_rng(comm.rank)
    if isinstance(model, nn.GPT):
        shape = (BATCH, CONTEXT - 2)
        return generator.integers(0, VOCAB, shape), generator.integers(0, VOCAB, shape)
    return generator.standard_normal((BATCH, WIDTH), np.float32), generator.integers(0, 3, BATCH)


def forward(engine: mz.Engine) -> Tensor:
    x, y = batch(engine.model)
    return F.cross_entropy(engine(x), y)


def train(engine: mz.Engine) -> mz.Engine:
    engine.backward(forward(engine))
    engine.step()
    return engine


def models() -> list[nn.Module]:
    return [model for dtype in ("float32", "bfloat16") for model in (mlp(dtype=dtype), gpt(dtype=dtype))]


# Gradients.


def whole_gradients(engine: mz.Engine, layer: int) -> tuple[list[int], list[int]]:
    """One backward, looked at before each collecting, reducing and keeping: how many whole gradients are alive, and in
    an MLP how many buffers of `layer` bytes beyond those at rest (and, under ZeRO-3, beyond one gathered unit)."""
    loss, at_rest, loose, extra = forward(engine), of_size(layer), list[int](), list[int]()

    def look() -> None:
        loose.append(len(watch.loose()))
        if isinstance(engine.model, nn.MLP):
            gathered = type(engine) is mz.Zero3 and any(unit.whole for unit in engine.units)
            extra.append(of_size(layer) - at_rest - gathered)

    with watched() as watch, ExitStack() as looks:
        for owner, method in ((engine, "reduce"), (Unit, "keep"), (Unit, "collect")):
            looks.enter_context(before_each(owner, method, look))
        engine.backward(loss)
    assert not watch.alive(), f"{here}, {type(engine).__name__}: after backward {watch.alive()} are alive"
    return loose, extra


def zero2_and_zero3_have_at_most_one_whole_gradient_at_any_time() -> None:
    for stage in (mz.Zero2, mz.Zero3):
        for model in models():
            engine = train(stage(model, mz.Adam(), comm))
            loose, extra = whole_gradients(engine, LAYER * engine.units[0].dtype.itemsize)
            assert len(loose) == 2 * len(engine.units) + len(model.parameters()), f"{here}: looked {len(loose)} times"
            assert max(loose) == 1, f"{here}, {stage.__name__}: whole gradients alive, look by look: {loose}"
            if isinstance(model, nn.MLP):
                assert max(extra) == 1, f"{here}, {stage.__name__}: buffers of a layer's size, look by look: {extra}"


def zero2_and_zero3_keep_chunks_of_the_gradients() -> None:
    for stage in (mz.Zero2, mz.Zero3):
        for model in models():
            engine = train(stage(model, mz.Adam(), comm))
            engine.backward(forward(engine))
            for unit in engine.units:
                g = unit.gradient
                assert g is not None and g.size == unit.length // comm.size, f"{here}, {unit.name}: {g}"
                assert g.base is None, f"{here}, {stage.__name__}, {unit.name}: the chunk is a view of a whole gradient"


def zero2_needs_no_more_for_the_gradients_of_more_layers_than_their_chunks() -> None:
    needed = {}
    for stage in (mz.Zero1, mz.Zero2):
        for layers in (4, 12):
            engine = train(stage(mlp(layers), mz.Adam(), comm))
            loss = forward(engine)
            needed[stage, layers] = peak(lambda: engine.backward(loss)) / (4 * LAYER)  # noqa: B023
    more1, more2 = (needed[stage, 12] - needed[stage, 4] for stage in (mz.Zero1, mz.Zero2))
    assert 7.5 < more1 < 8.5, f"{here}: 8 more layers need {more1:.2f} more layers of gradients under ZeRO-1"
    assert 8 / comm.size - 0.5 < more2 < 8 / comm.size + 0.5, f"{here}: ... and {more2:.2f} under ZeRO-2"


# Gathered weights.


def zero3_has_one_gathered_unit_at_a_time_in_forward_and_none_after_it() -> None:
    for model in [*models(), gpt(tied=True)]:
        engine = train(mz.Zero3(model, mz.Adam(), comm))
        root = sum(unit.module is model for unit in engine.units)
        before, alive = live(), []
        with watched() as watch, before_each(engine, "gather", lambda: alive.append(len(watch.alive()))):  # noqa: B023
            loss = forward(engine)
            assert len(watch.made) == len(engine.units), f"{here}: gathered {len(watch.made)} times"
            assert max(alive) == root, f"{here}: alive when the next one is gathered: {alive}"
            assert not watch.alive(), f"{here}: after forward {watch.alive()} are alive"
            if isinstance(model, nn.MLP):
                assert live() - before < SMALL, f"{here}: forward left {live() - before} bytes"

            alive.clear()
            engine.backward(loss)
            assert len(watch.made) == 3 * len(engine.units), f"{here}: {len(watch.made)} whole vectors were made"
            assert max(alive) <= root + 1, f"{here}: alive when the next one is gathered in backward: {alive}"
            assert not watch.alive(), f"{here}: after backward {watch.alive()} are alive"
            assert loss.item() > 0


class Own(nn.Module):
    """A user's own ways to use a weight (WIDTH, WIDTH)."""

    def __init__(self, way: str) -> None:
        self.way, self.w = way, Parameter((WIDTH, WIDTH), nn.normal(0.1))

    def forward(self, x: Tensor) -> Tensor:
        w, way = self.w, self.way
        if way == "x @ w.T":
            return F.tanh(x @ w.T)
        if way == "x @ w":
            return F.tanh(x @ w)
        if way == "w[1:3]":
            return x * w[1:3]
        if way == "w[0], w[-1]":
            return F.tanh(x * w[0]) + w[-1]
        if way == "w.reshape":
            return F.tanh(x @ w.reshape(2, WIDTH // 2, WIDTH)[1].T @ w.reshape(-1, WIDTH)[WIDTH // 2 :])
        if way == "views of views":
            return x * w.T[None, 4:6].reshape(2, WIDTH) + w.swapaxes(0, 1).transpose()[:1]
        if way == "w[[5, 7]]":
            return x * w[np.array([5, 7])]
        if way == "w @ column":
            return F.tanh((w @ x.T).T)
        raise ValueError(way)


WAYS = ("x @ w.T", "x @ w", "w[1:3]", "w[0], w[-1]", "w.reshape", "views of views", "w[[5, 7]]", "w @ column")


class Owns(nn.Module):
    def __init__(self, way: str) -> None:
        self.first, self.own, self.last = nn.Linear(WIDTH, WIDTH), Own(way), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.last(self.own(self.first(x)))


def zero3_releases_weights_that_a_user_indexes_transposes_and_reshapes() -> None:
    for way in WAYS:
        engines = [train(stage(Owns(way), mz.SGD(0.1), comm)) for stage in (mz.DataParallel, mz.Zero3)]
        engine = engines[1]
        before = live()
        with watched() as watch:
            loss = forward(engine)
            assert len(watch.made) == 3 and not watch.alive(), f"{here}, {way}: after forward {watch.alive()} are alive"
            assert live() - before < SMALL, f"{here}, {way}: forward left {live() - before} bytes"
            engine.backward(loss)
            assert not watch.alive(), f"{here}, {way}: after backward {watch.alive()} are alive"
        engine.step()
        train(engines[0])
        dp, zero3 = (engine.gather_parameters() for engine in engines)
        for name, weight in dp.items():
            assert (weight.view("u4") == zero3[name].view("u4")).all(), f"{here}, {way}: {name} is not that of DP"


class Twice(nn.Module):
    """f(f(x))"""

    def __init__(self) -> None:
        self.f, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.last(self.f(F.relu(self.f(x))))


class Holder(nn.Module):
    """A root unit: a weight that the model holds itself, used first and last."""

    def __init__(self) -> None:
        self.w, self.inner = Parameter((WIDTH, WIDTH), nn.normal(0.1)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.inner(F.matmul(x, self.w)) @ self.w.T


def frozen(*layers: int) -> nn.MLP:
    model = mlp()
    for layer in layers:
        for parameter in model.layers[layer].parameters():
            parameter.requires_grad = False
    return model


def zero3_releases_units_that_are_frozen_used_twice_or_the_root() -> None:
    for make in (Twice, Holder, lambda: frozen(2, 3), lambda: frozen(0), lambda: frozen(LAYERS - 1)):
        engine = train(mz.Zero3(make(), mz.Adam(), comm))
        before = live()
        with watched() as watch:
            loss = forward(engine)
            made = len(watch.made)
            assert made >= len(engine.units) and not watch.alive(), f"{here}: after forward {watch.alive()} are alive"
            assert live() - before < SMALL, f"{here}: forward left {live() - before} bytes"
            engine.backward(loss)
            assert len(watch.made) > made and not watch.alive(), f"{here}: after backward {watch.alive()} are alive"
        assert all(unit.gradient is None and unit.state is None for unit in engine.units if not unit.trainable)


def zero3_evaluates_without_leaving_anything() -> None:
    for make in (mlp, gpt, Twice, Holder):
        engine = train(mz.Zero3(make(), mz.Adam(), comm))
        before = live()
        with watched() as watch, mz.no_grad():
            out = engine(batch(engine.model)[0])
            assert watch.made and not watch.alive(), f"{here}: after evaluation {watch.alive()} are alive"
            assert live() - before <= out.data.nbytes + 1024, f"{here}: evaluation left {live() - before} bytes"


class Trap(nn.Module):
    """Raises in forward, or in backward, when told to."""

    def __init__(self) -> None:
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.where = ""

    def forward(self, x: Any) -> Tensor:
        x = self.middle(F.relu(self.first(x)))
        if self.where == "forward":
            raise ArithmeticError("caught by the caller")
        if self.where == "backward":
            x = autograd.record(Tensor(x.data), (x,), self.broken, "broken")
        return self.last(x)

    @staticmethod
    def broken(gradient: Any) -> Any:
        raise ArithmeticError("caught by the caller")


class Inner(nn.Module):
    """A trap inside a unit, and a weight around it in the root unit: two units are whole when it snaps."""

    def __init__(self) -> None:
        self.trap, self.w = Trap(), Parameter((WIDTH, WIDTH), nn.normal(0.1))

    def forward(self, x: Any) -> Tensor:
        return self.trap(F.matmul(x, self.w))


def an_exception_leaves_nothing_gathered_and_the_next_step_is_as_if_it_had_not_been() -> None:
    for make in (Trap, Inner):
        for where in ("forward", "backward"):
            ends = []
            for stage in mz.STAGES:
                engine = train(stage(make(), mz.SGD(0.1, momentum=0.9), comm))
                trap: Any = getattr(engine.model, "trap", engine.model)
                before, whole = live(), [unit.whole for unit in engine.units]
                with watched() as watch:
                    trap.where = where
                    try:
                        engine.backward(forward(engine))
                    except ArithmeticError as error:
                        assert "caught" in str(error)
                    else:
                        raise AssertionError("the trap did not snap")
                    trap.where = ""
                    assert not watch.alive(), f"{here}, {stage.__name__}, {where}: {watch.alive()} are alive"
                    assert whole == [unit.whole for unit in engine.units], f"{here}, {stage.__name__}, {where}"
                    assert live() - before < SMALL, f"{here}, {stage.__name__}, {where}: left {live() - before} bytes"
                engine.zero_grad()
                train(engine)
                ends.append(engine.gather_parameters())
            undisturbed = train(train(mz.DataParallel(make(), mz.SGD(0.1, momentum=0.9), comm))).gather_parameters()
            for stage, end in zip(mz.STAGES, ends, strict=True):
                for name, weight in undisturbed.items():
                    same = (weight.view("u4") == end[name].view("u4")).all()
                    assert same, f"{here}, {stage.__name__}: after an exception in {where}, {name} differs"


def backward_without_step_then_zero_grad_leaves_no_trace() -> None:
    plain = train(train(mz.DataParallel(mlp(3), mz.Adam(), comm))).gather_parameters()
    for stage in mz.STAGES:
        engine = train(stage(mlp(3), mz.Adam(), comm))
        before = live()
        engine.backward(forward(engine))
        with engine.no_sync():
            engine.backward(forward(engine))
        engine.zero_grad()
        assert live() == before, f"{here}, {stage.__name__}: zero_grad left {live() - before} bytes"
        for name, weight in train(engine).gather_parameters().items():
            assert (weight.view("u4") == plain[name].view("u4")).all(), f"{here}, {stage.__name__}: {name} differs"


# What is held for good.


def moments_exist_for_the_own_chunk_only() -> None:
    for stage in mz.STAGES:
        for model in models():
            engine = train(stage(model, mz.Adam(master=True), comm))
            for unit in engine.units:
                share = unit.length if stage is mz.DataParallel else unit.length // comm.size
                keys = {"exp_avg", "exp_avg_sq"} | ({"master"} if unit.dtype.itemsize == 2 else set())
                assert unit.state is not None and set(unit.state) == keys, f"{here}, {unit.name}: {unit.state}"
                for key, vector in unit.state.items():
                    assert (vector.size, vector.dtype.name, vector.base) == (share, "float32", None), f"{here}, {key}"


def zero3_holds_chunks_of_the_weights_and_the_others_nothing_twice() -> None:
    for stage in mz.STAGES:
        for model in models():
            drop_spare(comm)
            before = live()
            engine = train(stage(model, mz.SGD(0.1), comm))
            for unit in engine.units:
                assert unit.weights.base is None, f"{here}, {stage.__name__}, {unit.name}: weights are a view"
                assert unit.whole is (stage is not mz.Zero3), f"{here}, {stage.__name__}, {unit.name}: whole at rest"
            held = sum(unit.length * unit.dtype.itemsize for unit in engine.units)
            held = held // comm.size if stage is mz.Zero3 else held
            more = live() - before - spare(engine)
            assert abs(more - held) < 1024, f"{here}, {stage.__name__}: {more} bytes live, not {held}"


def zero3_needs_the_same_temporary_memory_for_4_and_16_layers() -> None:
    for dtype in ("float32", "bfloat16"):
        layer = LAYER * (4 if dtype == "float32" else 2)
        needs: dict[str, list[int]] = {"evaluation": [], "forward": [], "backward": []}
        for layers in (4, 16):
            engine = train(mz.Zero3(mlp(layers, dtype), mz.Adam(), comm))
            with mz.no_grad():
                needs["evaluation"].append(peak(lambda: forward(engine)))  # noqa: B023
            losses: list[Tensor] = []
            needs["forward"].append(peak(lambda: losses.append(forward(engine))))  # noqa: B023
            needs["backward"].append(peak(lambda: engine.backward(losses.pop())))  # noqa: B023
        for work, (few, many) in needs.items():
            chunks = 12 * layer // comm.size if work == "backward" else 0  # gradients that stay
            assert few > layer, f"{here}, {dtype}: {work} needs only {few} bytes"
            grown = many - chunks - few  # by activations at most; 12 forgotten layers are far more
            assert grown < 2 * layer, f"{here}, {dtype}: {work} needs {few} bytes with 4 layers, {many} with 16"


def bfloat16_weights_have_no_float32_twin() -> None:
    for stage in mz.STAGES:
        for model in (mlp(dtype="bfloat16"), gpt(tied=True, dtype="bfloat16")):
            engine = stage(model, mz.SGD(0.1), comm)
            twins = {4 * p.size for p in model.parameters() if p.ndim > 1 and p.size > 1000}
            twins |= {4 * unit.length for unit in engine.units}
            for _ in range(2):
                loss = forward(engine)
                assert not of_size(*twins), f"{here}, {stage.__name__}: twins after forward"
                engine.backward(loss)
                assert not of_size(*twins), f"{here}, {stage.__name__}: twins after backward"
                engine.step()
                assert not of_size(*twins), f"{here}, {stage.__name__}: twins after the step"


def gather_parameters_holds_one_gathered_unit_at_a_time() -> None:
    engine = train(mz.Zero3(mlp(), mz.Adam(), comm))
    alive: list[int] = []
    with watched() as watch, before_each(engine, "gather", lambda: alive.append(len(watch.alive()))):
        found = engine.gather_parameters()
        assert max(alive) == 0 and len(watch.made) == LAYERS, f"{here}: alive when the next one is gathered: {alive}"
        assert not watch.alive(), f"{here}: {watch.alive()} are alive"
    assert all(array.base is None for array in found.values()), f"{here}: a result is a view of the whole unit"


CLAIMS = [value for name, value in list(globals().items()) if "_" in name and getattr(value, "__code__", None)
          and value.__module__ == "__main__" and not value.__code__.co_argcount]  # fmt: skip

if __name__ == "__main__":
    tracemalloc.start()
    gc.disable()  # what dies here dies at once, by its reference count
    for claim in CLAIMS:
        if not sys.argv[1:] or claim.__name__ in sys.argv[1:]:
            claim()
            gc.collect()
            if comm.rank == 0:
                print("ok", claim.__name__, flush=True)
