"""SGD and Adam: the right numbers, in the right dtypes, and the same bits for any slice of a vector."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minizero import SGD, Adam, Optimizer, backend, optim
from minizero.backend import DTYPES, Array, bfloat16, to_host, working, xp
from oracle import bits, same_bits

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(lr=0.1),
    "momentum": lambda: SGD(lr=0.1, momentum=0.9),
    "momentum master": lambda: SGD(lr=0.1, momentum=0.9, master=True),
    "adam": lambda: Adam(lr=0.05),
    "adam decay": lambda: Adam(lr=0.05, weight_decay=0.3),
    "adam master": lambda: Adam(lr=0.05, weight_decay=0.3, master=True),
}
BLOCK = backend.BLOCK
Vector = np.ndarray[Any, Any]

optimizers = pytest.mark.parametrize("kind", OPTIMIZERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
# Most are short; some are about as long as a block, where the walk could go wrong.
lengths = st.one_of(st.integers(0, 70), st.integers(-2, 2).map(lambda k: BLOCK + k), st.just(2 * BLOCK + 5))


def draw(seed: int, length: int, dtype: str, count: int = 1) -> list[Array]:
    generator = np.random.default_rng([seed, length])
    return [xp.asarray(generator.standard_normal(length), "float32").astype(DTYPES[dtype]) for _ in range(count)]


def train(optimizer: Optimizer, weights: Array, gradients: list[Array]) -> dict[str, Vector]:
    """Update `weights` in place by one gradient after another. Returns them and the state, on the host."""
    state = optimizer.init(weights)
    for step, gradient in enumerate(gradients, 1):
        optimizer.update(step, weights, gradient, state)
    return {"weights": np.array(to_host(weights)), **{key: to_host(x) for key, x in state.items()}}


def assert_same(found: dict[str, Vector], wanted: dict[str, Vector]) -> None:
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        assert same_bits(found[key], x), f"{key}: {(bits(found[key]) != bits(x)).sum()} of {x.size} elements differ"


# A rank may update a part of a vector on its own.


@given(st.sampled_from(list(OPTIMIZERS)), st.sampled_from(list(DTYPES)), st.data(), st.integers(0, 99))
@settings(max_examples=150)
def test_the_update_of_a_slice_is_the_slice_of_the_update(
    kind: str, dtype: str, data: st.DataObject, seed: int
) -> None:
    length = data.draw(lengths)
    start, stop = sorted((data.draw(st.integers(0, length)), data.draw(st.integers(0, length))))
    weights, *gradients = draw(seed, length, dtype, 4)
    part = weights[start:stop].copy()
    whole = train(OPTIMIZERS[kind](), weights, gradients)
    found = train(OPTIMIZERS[kind](), part, [gradient[start:stop].copy() for gradient in gradients])
    assert_same(found, {key: x[start:stop] for key, x in whole.items()})


@given(st.sampled_from(list(OPTIMIZERS)), st.sampled_from(list(DTYPES)), lengths, st.integers(0, 7), st.integers(1, 3))
@settings(max_examples=100)
def test_an_update_has_the_same_bits_at_every_offset_and_stride(
    kind: str, dtype: str, length: int, offset: int, stride: int
) -> None:
    weights, *gradients = draw(offset, length, dtype, 4)
    around = xp.full(offset + stride * length + 3, 7, DTYPES[dtype])
    view = around[offset : offset + stride * length : stride]
    view[:] = weights
    others = [xp.zeros(2 * length + 1, DTYPES[dtype])[1::2] for _ in gradients]
    for other, gradient in zip(others, gradients, strict=True):
        other[:] = gradient
    assert_same(train(OPTIMIZERS[kind](), view, others), train(OPTIMIZERS[kind](), weights, gradients))
    view[:] = 7
    assert (to_host(around).astype("float32") == 7).all(), "an element outside the view was written to"


@pytest.mark.skipif(backend.name != "numpy", reason="other array libraries have no addresses of this kind")
@optimizers
@dtypes
def test_an_update_has_the_same_bits_at_an_address_between_two_elements(kind: str, dtype: str) -> None:
    def shifted(x: Vector) -> Vector:
        view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
        view[:] = x
        assert not view.flags.aligned
        return view

    weights, *gradients = draw(5, 1003, dtype, 4)
    found = train(OPTIMIZERS[kind](), shifted(weights), list(map(shifted, gradients)))
    assert_same(found, train(OPTIMIZERS[kind](), weights, gradients))


@optimizers
@dtypes
def test_the_length_of_a_block_leaves_no_trace(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, *gradients = draw(1, 1000, dtype, 4)
    whole = train(OPTIMIZERS[kind](), weights.copy(), gradients)
    for block in (1, 7, 64, 999):
        monkeypatch.setattr(optim, "BLOCK", block)
        assert_same(train(OPTIMIZERS[kind](), weights.copy(), gradients), whole)


@given(st.sampled_from(list(DTYPES)), lengths, st.integers(0, 7), st.floats(0.01, 100), st.integers(0, 99))
@settings(max_examples=100)
def test_add_and_divide_round_each_element_once_wherever_it_lies(
    dtype: str, length: int, offset: int, divisor: float, seed: int
) -> None:
    x, y = draw(seed, length, dtype, 2)
    wide = working(DTYPES[dtype])
    a, b = to_host(x).astype(wide), to_host(y).astype(wide)
    around = xp.full(length + offset + 2, 7, DTYPES[dtype])
    view = around[offset : offset + length]
    view[:] = x
    optim.add(view, y)
    assert same_bits(to_host(view), (a + b).astype(DTYPES[dtype]))
    view[:] = x
    optim.divide(view, divisor)
    assert same_bits(to_host(view), (a / wide.type(divisor)).astype(DTYPES[dtype]))
    assert same_bits(to_host(y).astype(wide), b), "add changed what it adds"
    view[:] = 7
    assert (to_host(around).astype("float32") == 7).all(), "an element outside the view was written to"


# The right numbers.


def reference(optimizer: Optimizer, weights: Vector, gradients: list[Vector]) -> Vector:
    """The papers' formulas in float64, as they stand there."""
    w = weights.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.astype(np.float64)
        if isinstance(optimizer, SGD):
            m = optimizer.momentum * m + g
            w = w - optimizer.lr * m
        if isinstance(optimizer, Adam):
            beta1, beta2 = optimizer.betas
            w = w - optimizer.lr * optimizer.weight_decay * w
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            w = w - optimizer.lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + optimizer.eps)
    return w


@pytest.mark.parametrize(
    "make",
    [
        *OPTIMIZERS.values(),
        lambda: SGD(lr=3.0, momentum=0.5),
        lambda: Adam(lr=0.5, weight_decay=1.5),  # lr * weight_decay = 0.75
        lambda: Adam(lr=0.5, betas=(0.5, 0.7), eps=0.3, weight_decay=2.0),  # weights vanish in each step
        lambda: Adam(lr=0.1, betas=(0.0, 0.0)),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-5)])
def test_updates_agree_with_the_formulas_in_float64(
    make: Callable[[], Optimizer], dtype: str, tolerance: float
) -> None:
    weights, *gradients = draw(2, 500, dtype, 21)
    for gradient in gradients[::2]:
        gradient[:250] = 0  # a parameter that has a gradient in every second step
    start = np.array(to_host(weights))
    wanted = reference(make(), start, list(map(to_host, gradients)))
    found = train(make(), weights, gradients)["weights"]
    assert (np.abs(wanted - start) > 1e-3).mean() > 0.7
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_epsilon_is_outside_of_the_root() -> None:
    """With g = eps and a first step: lr * g / (g + eps) = lr / 2. Inside it would be lr / sqrt(1 + 1 / eps)."""
    for eps in (1e-3, 1.0, 1e3):
        weights, gradient = xp.zeros(1, "float64"), xp.full(1, eps)
        found = train(Adam(lr=0.1, eps=eps), weights, [gradient])["weights"]
        assert found[0] == pytest.approx(-0.05, rel=1e-12)


def test_weight_decay_is_not_part_of_the_moments() -> None:
    """Without gradients nothing is left but w * (1 - lr * weight_decay) in each step."""
    weights = xp.full(3, 2.0)
    found = train(Adam(lr=0.5, weight_decay=1.5), weights, [xp.zeros(3)] * 4)
    np.testing.assert_allclose(found["weights"], 2 * 0.25**4, rtol=1e-12)
    assert not found["exp_avg"].any() and not found["exp_avg_sq"].any()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.99), (0.0, 0.9)])
def test_bias_correction_makes_every_step_of_a_constant_gradient_as_long_as_lr(betas: tuple[float, float]) -> None:
    """m and v start at zero; corrected, m is g and v is g * g from the first step on, however large g is."""
    for g in (1e-4, 3.0, 1e6):
        weights, lr = xp.zeros(1, "float64"), 0.01
        optimizer = Adam(lr=lr, betas=betas, eps=0.0)
        state = optimizer.init(weights)
        for step in range(1, 30):
            optimizer.update(step, weights, xp.full(1, g), state)
            assert float(weights[0]) == pytest.approx(-lr * step, rel=1e-9)


def test_sgd_with_momentum_by_hand() -> None:
    weights = xp.full(1, 1.0)
    found = train(SGD(lr=0.5, momentum=0.5), weights, [xp.full(1, 1.0), xp.full(1, 1.0), xp.full(1, -2.0)])
    assert found["momentum_buffer"].tolist() == [-1.25]  # 1, 1.5, -1.25
    assert found["weights"].tolist() == [1 - 0.5 * (1 + 1.5 - 1.25)]


def test_the_learning_rate_may_change_between_steps() -> None:
    weights, optimizer = xp.zeros(1, "float64"), SGD(lr=1.0)
    for step, lr in enumerate((1.0, 0.5, 0.25), 1):
        optimizer.lr = lr
        optimizer.update(step, weights, xp.ones(1, "float64"), {})
    assert weights.tolist() == [-1.75]


# The right dtypes.


@optimizers
@dtypes
def test_weights_keep_their_dtype_and_state_is_as_wide_as_is_computed(kind: str, dtype: str) -> None:
    """float32 stays float32, float64 stays float64; bfloat16 has float32 state, and a master copy on demand."""
    weights, gradient = draw(3, 10, dtype, 2)
    found = train(OPTIMIZERS[kind](), weights, [gradient] * 2)
    assert weights.dtype == gradient.dtype == DTYPES[dtype]
    moments = {"momentum_buffer"} if "momentum" in kind else {"exp_avg", "exp_avg_sq"} if "adam" in kind else set()
    master = {"master"} if "master" in kind and dtype == "bfloat16" else set()
    assert found.keys() == {"weights"} | moments | master
    assert {x.dtype for key, x in found.items() if key != "weights"} <= {working(DTYPES[dtype])}
    if master:
        assert same_bits(found["weights"], found["master"].astype(bfloat16))


@pytest.mark.parametrize("scalar", [np.float64, np.float32])
@dtypes
def test_hyperparameters_that_are_numpy_scalars_change_no_dtype(scalar: Callable[[float], Any], dtype: str) -> None:
    for given_, plain in (
        (SGD(scalar(0.125), scalar(0.5)), SGD(0.125, 0.5)),
        (
            Adam(scalar(0.125), (scalar(0.5), scalar(0.75)), scalar(0.5), scalar(0.5)),
            Adam(0.125, (0.5, 0.75), 0.5, 0.5),
        ),
    ):
        weights, gradient = draw(4, 100, dtype, 2)
        found, wanted = (train(optimizer, weights.copy(), [gradient] * 3) for optimizer in (given_, plain))
        for key, x in wanted.items():
            assert found[key].dtype == x.dtype
            np.testing.assert_allclose(
                found[key].astype("float64"), x.astype("float64"), rtol=1e-2 if dtype == "bfloat16" else 1e-5
            )


@pytest.mark.parametrize(("make"), [SGD, lambda lr, master: Adam(lr, master=master)])
def test_a_master_copy_keeps_what_bfloat16_would_round_away(make: Callable[..., Optimizer]) -> None:
    """1.0 + 0.001 is 1.0 in bfloat16, whose next number is 1.0078125. Eight such steps come to that, with a copy."""
    plain, copied = (
        train(make(lr=0.001, master=master), xp.ones(4, bfloat16), [xp.full(4, -1, bfloat16)] * 8)
        for master in (False, True)
    )
    assert (plain["weights"].astype("float32") == 1.0).all()
    assert (copied["weights"].astype("float32") == 1.0078125).all()
    np.testing.assert_allclose(copied["master"], 1.008, rtol=1e-6)


def test_a_bfloat16_update_is_rounded_once() -> None:
    """As if in float32 throughout, then rounded: with moments and decay, one step at a time."""
    for kind in ("momentum", "adam decay"):
        weights, *gradients = draw(6, 3000, "bfloat16", 3)
        optimizer, wide = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
        state, other = optimizer.init(weights), wide.init(weights.astype("float32"))
        for step, gradient in enumerate(gradients, 1):
            exact = weights.astype("float32")
            wide.update(step, exact, gradient.astype("float32"), other)
            optimizer.update(step, weights, gradient, state)
            assert same_bits(to_host(weights), to_host(exact).astype(bfloat16))
        for key, x in state.items():
            assert same_bits(to_host(x), to_host(other[key]))


# Manners.


@optimizers
@dtypes
def test_an_update_leaves_the_gradient_as_it_is(kind: str, dtype: str) -> None:
    weights, gradient = draw(7, 100, dtype, 2)
    before, start = np.array(to_host(gradient)), np.array(to_host(weights))
    found = train(OPTIMIZERS[kind](), weights, [gradient] * 3)
    assert same_bits(to_host(gradient), before)
    assert (bits(found["weights"]) != bits(start)).mean() > 0.5


@optimizers
def test_two_vectors_do_not_disturb_each_other(kind: str) -> None:
    """One optimizer serves many vectors, of several dtypes: only its scratch is shared."""
    alone = {}
    for dtype, length in (("float32", 100), ("bfloat16", 70), ("float64", 3)):
        weights, *gradients = draw(8, length, dtype, 4)
        alone[dtype] = train(OPTIMIZERS[kind](), weights, gradients)
    optimizer = OPTIMIZERS[kind]()
    vectors = {dtype: draw(8, x["weights"].size, dtype, 4) for dtype, x in alone.items()}
    states = {dtype: optimizer.init(weights) for dtype, (weights, *_) in vectors.items()}
    for step in (1, 2, 3):
        for dtype, vector in vectors.items():
            optimizer.update(step, vector[0], vector[step], states[dtype])
    for dtype, wanted in alone.items():
        found = {"weights": vectors[dtype][0], **states[dtype]}
        assert_same({key: to_host(x) for key, x in found.items()}, wanted)


@optimizers
@dtypes
def test_vectors_of_other_lengths_are_refused_and_nothing_is_touched(kind: str, dtype: str) -> None:
    """A gradient of one element would otherwise be repeated for all weights."""
    weights, gradient = draw(9, 12, dtype, 2)
    start = np.array(to_host(weights))
    optimizer = OPTIMIZERS[kind]()
    state = optimizer.init(weights)
    wrong = [(gradient[:1], state), (gradient[:6], state), (gradient.reshape(3, 4), state)]
    wrong += [(gradient, {**state, key: x[:1]}) for key, x in state.items()]
    for bad_gradient, bad_state in wrong:
        with pytest.raises(ValueError, match="same length"):
            optimizer.update(1, weights, bad_gradient, bad_state)
    assert same_bits(to_host(weights), start)
    fresh = optimizer.init(weights)
    assert_same({key: to_host(x) for key, x in state.items()}, {key: to_host(x) for key, x in fresh.items()})


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lr=-1.0),
        lambda: SGD(lr=0.1, momentum=1.0),
        lambda: Adam(lr=math.nan),
        lambda: Adam(betas=(1.0, 0.999)),
        lambda: Adam(betas=(0.9, -0.1)),
        lambda: Adam(eps=-1e-8),
        lambda: Adam(weight_decay=-0.1),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(make: Callable[[], Optimizer]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        make()


@pytest.mark.skipif(backend.name != "numpy", reason="tracemalloc sees NumPy's arrays only")
@optimizers
@dtypes
def test_an_update_allocates_nothing(kind: str, dtype: str) -> None:
    weights, gradient = draw(10, 3 * BLOCK + 1, dtype, 2)
    optimizer = OPTIMIZERS[kind]()
    state = optimizer.init(weights)
    optimizer.update(1, weights, gradient, state)  # makes the scratch
    tracemalloc.start()
    try:
        optimizer.update(2, weights, gradient, state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BLOCK  # bytes: less than half of a block of the smallest dtype


@dtypes
def test_all_finite_finds_one_bad_number_anywhere_and_trusts_large_ones(dtype: str) -> None:
    length = 2 * BLOCK + 5
    large = float(np.finfo("float32" if dtype == "bfloat16" else dtype).max) / 2
    vector = xp.full(length, large, DTYPES[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        assert optim.all_finite(vector)  # though their sum overflows
        assert optim.all_finite(vector[:0])
        for place in (0, 1, BLOCK - 1, BLOCK, length - 1):
            for bad in (math.nan, math.inf, -math.inf):
                vector = xp.zeros(length, DTYPES[dtype])
                assert optim.all_finite(vector)
                vector[place] = bad
                assert not optim.all_finite(vector), (place, bad)
        vector[-2], vector[-1] = math.inf, -math.inf
        assert not optim.all_finite(vector)
