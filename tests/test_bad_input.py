"""Bad input: is it refused where it comes in, in one sentence that says what was wrong, where, and what to do?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import minizero as mz
from launch import run_python, run_ranks
from minizero import functional as F
from minizero import nn

f4 = np.float32
X, Y = np.ones((4, 3), f4), np.array([0, 1, 0, 1])
stages = pytest.mark.parametrize("stage", mz.STAGES, ids=lambda stage: stage.__name__)


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """`call` raises `kind`, whose one sentence contains all `words`."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert "\n" not in text and len(text) < 500, f"not one sentence: {text}"


def engine(stage: type[mz.Engine] = mz.Zero2, model: nn.Module | None = None) -> mz.Engine:
    return stage(model or nn.MLP([3, 5, 2], seed=1), mz.SGD(0.1), mz.Communicator())


def loss(engine: mz.Engine, examples: int = 4) -> mz.Tensor:
    return F.cross_entropy(engine(X[:examples]), Y[:examples])


def gpt() -> nn.GPT:
    return nn.GPT(vocab=5, context=4, width=6, heads=2, layers=1)


# Before anything runs.


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_launcher_of_another_mpi_is_noticed(variable: str) -> None:
    done = run_python("-c", "import minizero as mz; mz.Communicator()", env={variable: "8"}, check=False)
    assert done.returncode, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert "started 8 processes, but each of them is rank 0 of 1" in last or "mpirun is Open MPI's" in last, last
    for word in ("mpi4py loaded", "PATH", "MPI4PY_LIBMPI", "minizero doctor"):
        assert word in last, f"{word!r} not in: {last}"


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("jax", "MINIZERO_BACKEND='jax' is unknown: use auto, numpy or cupy"),
        ("cupy", "MINIZERO_BACKEND=cupy, but CuPy"),
    ],
)
def test_a_backend_that_cannot_be_had_is_named(backend: str, words: str) -> None:
    hidden = "import sys; sys.modules['cupy'] = None; import minizero"  # as if CuPy were not installed
    done = run_python("-c", hidden, env={"MINIZERO_BACKEND": backend}, check=False)
    assert done.returncode, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert words in last and ("pip install" in last or backend != "cupy"), last


# Models, data, labels.


@pytest.mark.parametrize("dtype", ["float16", "int8", "double", np.int64, None])
def test_a_dtype_that_is_not_trained_in_is_refused_by_name(dtype: Any) -> None:
    name = "int64" if dtype is np.int64 else str(dtype)
    wanted = f"dtype {name!r} is not supported: use one of float32, float64, bfloat16".replace("'None'", "None")
    for make in (
        lambda: nn.MLP([3, 2], dtype=dtype),
        lambda: nn.Linear(3, 2, dtype=dtype),
        lambda: nn.GPT(vocab=5, context=4, width=6, heads=2, layers=1, dtype=dtype),
        lambda: F.astype(X, dtype),
    ):
        refused(make, TypeError, wanted)


BAD_ARRAYS: list[tuple[str, Callable[[], Any], type[Exception], list[str]]] = [
    ("MLP, width", lambda: nn.MLP([3, 5])(np.ones((4, 7), f4)), ValueError, ["linear", "(4, 7)", "(5, 3)"]),
    ("MLP, no axis", lambda: nn.MLP([3, 5])(f4(3)), ValueError, ["linear", "()", "(5, 3)"]),
    ("MLP, float64", lambda: nn.MLP([3, 5])(np.ones((4, 3))), TypeError, ["float64 and float32", "astype"]),
    ("MLP, float16", lambda: nn.MLP([3, 5])(np.ones((4, 3), "float16")), TypeError, ["float16 and float32", "astype"]),
    ("MLP, strings", lambda: nn.MLP([3, 5])(np.array([["a"] * 3])), TypeError, ["linear", "<U1"]),
    ("MLP, None", lambda: nn.MLP([3, 5])(None), TypeError, ["linear", "NoneType"]),
    ("MLP, one size", lambda: nn.MLP([3]), ValueError, ["an input and an output size", "[3]"]),
    ("GPT, heads", lambda: nn.GPT(vocab=5, context=4, width=6, heads=4, layers=1), ValueError, ["width 6", "4 heads"]),
    ("GPT, no heads", lambda: nn.GPT(vocab=5, context=4, width=6, heads=0, layers=1), ValueError, ["0 heads"]),
    ("GPT, floats", lambda: gpt()(np.ones((2, 3), f4)), TypeError, ["tokens must be integers", "float32"]),
    ("GPT, token 5", lambda: gpt()(np.full((2, 3), 5)), IndexError, ["tokens must lie in 0 to 4", "found 5"]),
    ("GPT, token -1", lambda: gpt()(np.full((2, 3), -1)), IndexError, ["tokens must lie in 0 to 4", "found -1"]),
    ("GPT, too long", lambda: gpt()(np.zeros((2, 5), int)), ValueError, ["5 tokens", "context is 4"]),
    ("GPT, no batch", lambda: gpt()(np.zeros(3, int)), ValueError, ["(batch, time)", "(3,)"]),
    ("GPT, no time", lambda: gpt()(np.zeros((2, 0), int)), ValueError, ["(batch, time)", "(2, 0)"]),
    ("GPT, three axes", lambda: gpt()(np.zeros((2, 2, 2), int)), ValueError, ["(batch, time)", "(2, 2, 2)"]),
    ("labels, too large", lambda: F.cross_entropy(X, np.array([0, 3, 1, 2])), IndexError, ["targets", "found 3"]),
    ("labels, negative", lambda: F.cross_entropy(X, np.array([0, -1, 1, 2])), IndexError, ["targets", "found -1"]),
    ("labels, floats", lambda: F.cross_entropy(X, np.ones(4, f4)), TypeError, ["targets must be integers", "float32"]),
    ("labels, one-hot", lambda: F.cross_entropy(X, np.ones((4, 3), int)), ValueError, ["targets (4, 3)"]),
    ("labels, too few", lambda: F.cross_entropy(X, np.array([0, 1])), ValueError, ["targets (2,)", "logits (4, 3)"]),
    ("logits, no axis", lambda: F.cross_entropy(f4(3), np.array(0)), ValueError, ["logits ()", "(..., classes)"]),
    ("logits, no classes", lambda: F.cross_entropy(X[:, :0], Y), ValueError, ["logits (4, 0)"]),
    ("mse, shapes", lambda: F.mse_loss(np.ones((4, 1), f4), np.ones(4, f4)), ValueError, ["(4, 1)", "(4,)", "differ"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), [row[1:] for row in BAD_ARRAYS], ids=[row[0] for row in BAD_ARRAYS])
def test_an_array_that_does_not_fit_is_refused(
    call: Callable[[], Any], kind: type[Exception], words: list[str]
) -> None:
    refused(call, kind, *words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda value: mz.SGD(value), "SGD: lr"),
        (lambda value: mz.Adam(value), "Adam: lr"),
        (lambda value: mz.SGD(0.1, momentum=value), "SGD: momentum"),
        (lambda value: mz.Adam(betas=(value, 0.9)), "Adam: betas"),
        (lambda value: mz.Adam(betas=(0.9, value)), "Adam: betas"),
        (lambda value: mz.Adam(eps=value), "Adam: eps and weight_decay"),
        (lambda value: mz.Adam(weight_decay=value), "Adam: eps and weight_decay"),
    ],
)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_senseless_hyperparameter_is_refused(make: Callable[[float], Any], words: str, value: float) -> None:
    refused(lambda: make(value), ValueError, words, "at least 0 and less than", str(value))


def test_factors_below_one_are_refused_at_one() -> None:
    refused(
        lambda: mz.SGD(0.1, momentum=1.0), ValueError, "SGD: momentum must be at least 0 and less than 1, not (1.0,)"
    )
    refused(
        lambda: mz.Adam(betas=(0.9, 1.0)), ValueError, "Adam: betas must be at least 0 and less than 1, not (0.9, 1.0)"
    )
    with pytest.raises(ValueError, match="unpack"):
        mz.Adam(betas=(0.9,))  # type: ignore[arg-type]


# The engine.


@stages
def test_only_a_fresh_model_and_an_optimizer_are_wrapped(stage: type[mz.Engine]) -> None:
    wrapped = engine(stage)
    block = nn.Sequential(wrapped.model.layers[0])  # type: ignore[attr-defined]
    for model in (wrapped.model, wrapped.model.layers[0], block):  # type: ignore[attr-defined]
        refused(partial(engine, stage, model), ValueError, "already wrapped by an engine", "make a new model")
    needs = f"{stage.__name__}(model, optimizer) needs an nn.Module and SGD or Adam, not "
    make: Any = stage
    for wrong in (
        (wrapped, mz.SGD(0.1)),
        (mz.SGD(0.1), nn.MLP([3, 2])),
        (nn.MLP([3, 2]), mz.SGD),
        (nn.MLP([3, 2]), None),
    ):
        refused(partial(make, *wrong, mz.Communicator()), TypeError, needs)
    wrapped.backward(loss(wrapped))
    wrapped.step()
    assert wrapped.steps == 1, "the engine that was there first works no more"


@stages
def test_a_model_without_anything_to_train_is_refused_in_backward(stage: type[mz.Engine]) -> None:
    frozen = nn.MLP([3, 2])
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    for model in (frozen, nn.Sequential(F.relu)):
        still = engine(stage, model)
        assert np.isfinite(loss(still).item()), "looking is allowed"
        refused(
            partial(still.backward, loss(still)), ValueError, "does not depend on anything that requires a gradient"
        )
        refused(still.step, RuntimeError, "there are no gradients: call backward first")


@stages
def test_calls_in_the_wrong_order_are_refused_and_change_nothing(stage: type[mz.Engine]) -> None:
    e = engine(stage)
    before = e.gather_parameters()
    for call in (e.step, lambda: e.clip_grad_norm(1.0)):
        refused(call, RuntimeError, "there are no gradients: call backward first")
    with e.no_sync():
        e.backward(loss(e))
    for call in (e.step, lambda: e.clip_grad_norm(1.0)):
        refused(call, RuntimeError, "the last backward must be outside no_sync")
    e.zero_grad()

    again = loss(e)
    e.backward(again)
    refused(lambda: e.backward(again), RuntimeError, "already", "compute the result again")
    refused(e.step, RuntimeError, "there are no gradients")  # what was collected is not one mean any more
    e.backward(loss(e))
    e.clip_grad_norm(1.0)
    refused(lambda: e.backward(loss(e)), RuntimeError, "the mean gradient was already taken", "step() or zero_grad()")
    for max_norm in (0, -1.0, float("nan")):
        refused(partial(e.clip_grad_norm, max_norm), ValueError, "max_norm must be more than 0", str(max_norm))
    after = e.gather_parameters()
    assert e.steps == 0 and all((before[name].view("u4") == after[name].view("u4")).all() for name in before)
    e.step()
    moved = e.gather_parameters()
    assert e.steps == 1 and all((before[name] != moved[name]).any() for name in before), (
        "the step after all that did nothing"
    )


@stages
def test_what_backward_cannot_use_is_refused(stage: type[mz.Engine]) -> None:
    e = engine(stage)
    wrong: Any
    for wrong in (3.0, np.float32(3), None, loss(e).item()):
        refused(partial(e.backward, wrong), TypeError, "needs the Tensor that the loss function", type(wrong).__name__)
    refused(lambda: e.backward(e(X)), ValueError, "(4, 2) is not a single number: pass gradient=")
    refused(lambda: e.backward(e(X), gradient=np.ones((2, 2))), ValueError, "gradient has shape (2, 2)", "(4, 2)")
    with mz.no_grad():
        unrecorded = loss(e)
    refused(lambda: e.backward(unrecorded), ValueError, "does not depend on anything that requires a gradient")
    for wrong in (-1, 1.5, float("nan"), "3"):
        words = "rank 0", f"examples={wrong!r}", "integer of 0 or more"
        refused(partial(e.backward, loss(e), examples=wrong), ValueError, *words)
    refused(e.step, RuntimeError, "there are no gradients")


@stages
def test_a_batch_without_examples_has_no_mean(stage: type[mz.Engine]) -> None:
    e = engine(stage)
    for examples in (None, 0):
        e.backward(loss(e, 0), examples=examples)
        refused(e.step, ValueError, "no rank had a single example since the last step")
        e.zero_grad()
    e.backward(F.cross_entropy(e.model(X), Y))  # not through engine(x): how many examples that were is not known
    e.step()
    assert e.steps == 1


@stages
def test_requires_grad_is_fixed_when_the_model_is_wrapped(stage: type[mz.Engine]) -> None:
    e = engine(stage)
    weight = e.model.layers[0].weight  # type: ignore[attr-defined]
    weight.requires_grad = False
    refused(lambda: e.backward(loss(e)), RuntimeError, "requires_grad of layers.0.weight", "after wrapping")
    weight.requires_grad = True
    e.backward(loss(e))
    e.step()


def test_a_parameter_outside_its_module_is_refused_by_name_under_zero3() -> None:
    e = engine(mz.Zero3)
    weight = e.model.layers[0].weight  # type: ignore[attr-defined]
    for use in (lambda: weight.data, lambda: (weight * 2).sum(), lambda: weight.T.data, lambda: F.linear(X, weight)):
        refused(use, RuntimeError, "layers.0.weight", "not gathered", "gather_parameters()")
    assert "layers.0.weight" in repr(weight), "looking at it in a debugger is allowed"
    assert set(e.gather_parameters()) == {name for name, _ in e.model.named_parameters()}
    e.backward(loss(e))
    e.step()


# With several ranks.


@pytest.mark.parametrize("n", [3, 5])
def test_bad_numbers_and_exceptions_leave_all_ranks_as_they_were(n: int) -> None:
    done = run_ranks(n, "tests/jobs/input_numbers.py", timeout=240)
    assert done.stdout.count("done") == n, done.stdout
