"""Cases in which real frameworks went wrong for real users: are Adam's numbers right here, and bad ones kept out?

Adam; Norms and bad numbers. Training is in test_cases_training.py. What each case does stands in jobs/cases_adam.py
and jobs/cases_bad_numbers.py; what must come out of it, here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launch import ROOT
from minizero import functional as F
from minizero.autograd import Tensor, operations
from minizero.backend import DTYPES, working, xp

sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from cases_results import Cases, Facts, agreed

case = Cases("cases_numbers.py")
SLOPES = np.array([0.5, -2.0, 3.0])  # the mean gradient, wherever there is one
Vector = np.ndarray[Any, Any]


@pytest.fixture
def facts(n: int, request: pytest.FixtureRequest) -> list[Facts]:
    return case.facts(n, request.function.__name__)


# Adam


def half(x: Tensor) -> Tensor:
    return x * np.float64(0.5) + np.array(0.25)


EVERY: dict[str, Callable[[Tensor], Tensor]] = {  # x is (3, 4), 0.5 to 1.5; NumPy's numbers where they can be
    "add": lambda x: F.add(x, np.float64(2)),
    "sub": lambda x: F.sub(np.float64(2), x),
    "mul": lambda x: np.float64(2) * x,
    "div": lambda x: np.float64(2) / x / np.array(3.0),
    "neg": lambda x: -x,
    "pow": lambda x: x ** np.float64(1.5),
    "matmul": lambda x: x @ half(x).T,
    "linear": lambda x: F.linear(x, half(x), half(x)[:, 0]),
    "sum": lambda x: x.sum() * np.float64(2),
    "mean": lambda x: x.mean(axis=0) - np.float64(2),
    "max": lambda x: x.max(axis=1),
    "reshape": lambda x: x.reshape(4, 3),
    "transpose": lambda x: x.T,
    "index": lambda x: x[np.array([0, 0])] + x[1:],
    "concatenate": lambda x: F.concatenate([x, half(x)]),
    "where": lambda x: F.where(x.numpy() > 1, x, np.float64(2)),
    "astype": lambda x: x.astype(x.dtype),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "sqrt": lambda x: x.sqrt(),
    "tanh": lambda x: x.tanh(),
    "relu": lambda x: F.relu(x - np.float64(1)),
    "gelu": lambda x: F.gelu(x),
    "dropout": lambda x: F.dropout(x, np.float64(0.5), np.random.default_rng(0)),
    "softmax": lambda x: F.softmax(x),
    "log_softmax": lambda x: F.log_softmax(x),
    "layer_norm": lambda x: F.layer_norm(x, half(x)[0], half(x)[1], np.float64(1e-5)),
    "embedding": lambda x: F.embedding(x, np.array([2, 0])),
    "cross_entropy": lambda x: F.cross_entropy(x, np.array([0, 1, 2])) * np.float64(2),
    "mse_loss": lambda x: F.mse_loss(x, half(x)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EVERY)
def test_every_operation_keeps_its_dtype_when_numbers_from_numpy_are_mixed_in(name: str, dtype: str) -> None:
    """Adam: float32 stays float32, forward and backward; bfloat16 is computed in float32."""
    x = Tensor(xp.linspace(0.5, 1.5, 12).reshape(3, 4).astype(DTYPES[dtype]), requires_grad=True)
    result = EVERY[name](x)
    keeps = name in ("reshape", "transpose", "astype")  # these do not compute
    assert result.dtype == (x.dtype if keeps else working(x.dtype))
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype == working(x.dtype) and x.grad.shape == (3, 4)
    assert (x.grad != 0).any() or name in ("sub", "softmax", "log_softmax", "layer_norm"), "no gradient came back"


def test_the_table_of_operations_is_complete() -> None:
    """Adam: of which every dtype is looked at."""
    assert set(EVERY) == set(operations)


@case(3)
def test_every_dtype_stays_what_it_is_in_training_with_numbers_from_numpy(facts: list[Facts]) -> None:
    """Adam: of what each stage holds after each call."""
    assert agreed(facts) == {
        dtype: {"weights": [dtype], "gradients": [dtype], "optimizer": [wide], "norm": ["float"]}
        for dtype, wide in (("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32"))
    }


def adam(
    start: list[float], gradients: list[Vector], lr: float, betas: tuple[float, float], eps: float, decay: float,
    inside: bool = False,
) -> list[Vector]:  # fmt: skip
    """The papers' formulas in float64: the weights at the start and after each step."""
    w = np.array(start)
    m, v, way = np.zeros(w.shape), np.zeros(w.shape), [w]
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        w = w - lr * decay * w - lr * m_hat / (np.sqrt(v_hat + eps) if inside else np.sqrt(v_hat) + eps)
        way.append(w)
    return way


def follows(found: Facts, name: str, gradients: list[Vector], *settings: Any) -> None:
    """The weights of `name` took the formula's way, in both dtypes and in all stages."""
    assert found["unlike"] == []
    for dtype, tolerance in (("float64", 1e-13), ("float32", 1e-5)):
        way = found[dtype][name]
        assert len(way) == len(gradients) + 1
        wanted = adam(way[0], gradients, *settings)
        np.testing.assert_allclose(way, wanted, rtol=tolerance, atol=tolerance)


@case(3)
def test_a_parameter_with_a_gradient_in_every_second_step_follows_the_formula(facts: list[Facts]) -> None:
    """Adam: its moments decay and steps are counted in between, and its weights go on moving."""
    found, settings = agreed(facts), (0.1, (0.8, 0.95), 1e-8, 0.0)
    follows(found, "always.weight", [SLOPES] * 6, *settings)
    follows(found, "sometimes.weight", [SLOPES, 0 * SLOPES] * 3, *settings)
    way = np.array(found["float64"]["sometimes.weight"])
    assert (abs(np.diff(way, axis=0)) > 0.01).all(), "it stood still without a gradient"


@case(3)
def test_weight_decay_is_decoupled_and_epsilon_outside_of_the_root(facts: list[Facts]) -> None:
    """Adam: at lr x weight_decay = 0.75, and at an epsilon of 0.3."""
    found = agreed(facts)
    follows(found["decay"], "always.weight", [SLOPES] * 6, 0.5, (0.9, 0.999), 1e-8, 1.5)
    settings = 0.5, (0.5, 0.7), 0.3, 0.5
    follows(found["epsilon"], "always.weight", [SLOPES] * 6, *settings)
    way = found["epsilon"]["float64"]["always.weight"]
    assert abs(way[-1] - adam(way[0], [SLOPES] * 6, *settings, True)[-1]).max() > 0.05


@case(3)
def test_a_parameter_that_is_never_used_only_decays(facts: list[Facts]) -> None:
    """Adam, a relative: by 1 - lr x weight_decay in each step, with moments of zero."""
    found = agreed(facts)
    assert found.pop("moments") == {"exp_avg": [0, 0, 0], "exp_avg_sq": [0, 0, 0]}
    follows(found, "never.weight", [0 * SLOPES] * 4, 0.5, (0.9, 0.999), 1e-8, 0.5)
    first, *_, last = found["float64"]["never.weight"]
    assert last == pytest.approx([w * 0.75**4 for w in first]) and min(map(abs, first)) > 0.01


@case(3)
def test_numbers_from_numpy_have_the_bits_of_pythons(facts: list[Facts]) -> None:
    """Adam, a relative"""
    assert agreed(facts) == {"compared": 4 * (6 + 6) + 4 * (6 + 12), "unlike": []}


# Norms and bad numbers


def refusal(name: str) -> Facts:
    """Four stages raised twice each, in these words; neither weights, moments nor steps changed."""
    text = (
        f"step 3: the gradient of {name} is not finite (inf or NaN); nothing was updated. Call zero_grad() and go on "
        "with the next batch, or look for the cause (learning rate, input, log of 0)"
    )
    return {"errors": [text], "raised": 4 * 2, "unlike": [], "steps": [2] * 4}


@case(3, 5)
def test_a_bad_number_on_one_rank_is_the_same_error_on_all_and_changes_nothing(facts: list[Facts], n: int) -> None:
    """Norms and bad numbers: it names the parameter, and no other."""
    ways = ("inf on rank 0", f"-inf on rank {n - 1}", "nan on rank 1")
    assert agreed(facts) == {way: refusal("parts.1.weight") for way in ways}


@case(3)
def test_an_infinite_norm_never_becomes_a_weight(facts: list[Facts]) -> None:
    """Norms and bad numbers: dividing by it would make inf NaN, and all other gradients zero."""
    bad = {value: refusal("parts.2.weight") for value in ("inf", "-inf", "nan")}
    assert agreed(facts) == {"norms": ["inf", "nan"], "touched by clipping": [], **bad}


@case(3)
def test_squares_that_overflow_are_refused_by_clipping_on_every_rank(facts: list[Facts]) -> None:
    """Norms and bad numbers: finite gradients have an infinite norm only in float64. Without clipping they train."""
    text = "clip_grad_norm: the squares of these gradients overflow, and nothing was clipped"
    assert agreed(facts) == {"errors": [text], "unlike": [], "finite": True}


@case(3, 5)
def test_bad_numbers_that_no_single_gradient_shows_are_refused_as_well(facts: list[Facts]) -> None:
    """Norms and bad numbers, a relative"""
    ways = ("all_large", "opposite", "first_of_two", "locally", "without_examples", "rounded_up")
    assert agreed(facts) == {way: refusal("parts.0.weight") for way in ways}


@case(3, 5)
def test_a_norm_may_be_taken_without_clipping(facts: list[Facts], n: int) -> None:
    """Norms and bad numbers, a relative: 5 gradients of the mean of 1 to N, 3 frozen ones, 2 used twice."""
    mean = (n + 1) / 2
    wanted = math.sqrt(5 * mean**2 + 2 * (2 * mean) ** 2)
    assert agreed(facts) == {"norms": [pytest.approx(wanted, rel=1e-12)] * 4, "unlike": []}


@case(3)
def test_gradients_of_any_size_leave_finite_weights(facts: list[Facts]) -> None:
    """Norms and bad numbers, a relative: and have the norm that they have, though their squares are no float32."""
    found = agreed(facts)
    assert len(found) == 2 * 4
    for way, here in found.items():
        size = float(np.float32(way.split(", ")[1]))
        assert here == {"unlike": [], "finite": True, "norm": pytest.approx(size * math.sqrt(10), rel=1e-6)}, way


def test_a_case_that_fails_on_one_rank_leaves_the_others_as_they_are() -> None:
    """About this file's own job: each case is fenced off."""
    fenced = Cases("cases_numbers.py")
    fenced.names[3] = ["fails_on_one_rank", "a_norm_may_be_taken_without_clipping", "fails_on_one_rank"]
    with pytest.raises(AssertionError) as failure:
        fenced.facts(3, "fails_on_one_rank")
    text = str(failure.value)
    assert text.count("\nZeroDivisionError") == 1 and text.count("fails_on_one_rank has failed on rank 1\n") == 2, text
    assert len(fenced.facts(3, "a_norm_may_be_taken_without_clipping")) == 3
