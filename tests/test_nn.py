"""Layers, their gradients and names, and parameters that are drawn late."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minizero as mz
from launch import ROOT, run_ranks
from minizero import functional as F
from minizero import nn
from minizero.autograd import Tensor
from minizero.backend import bfloat16, to_host, xp
from minizero.flat import units_of
from minizero.nn import Module
from minizero.parameter import DRAW_BLOCK, Parameter, constant, normal, uniform

Array = np.ndarray[Any, Any]
TINY = {"vocab": 5, "context": 4, "width": 4, "heads": 2, "layers": 1}


def host(x: Any) -> Array:
    return np.array(to_host(x.data if isinstance(x, Tensor) else x))


def values(model: Module) -> dict[str, Array]:
    model.materialise()
    return {name: host(parameter) for name, parameter in model.named_parameters()}


def same_bits(x: Array, y: Array) -> bool:
    unsigned = f"u{x.dtype.itemsize}"
    return x.dtype == y.dtype and x.shape == y.shape and bool((x.view(unsigned) == y.view(unsigned)).all())


def equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return list(one) == list(other) and all(same_bits(one[name], other[name]) for name in one)


def gpt(**changes: Any) -> nn.GPT:
    return nn.GPT(**{**TINY, **changes})


# Drawn late.


def test_nothing_is_drawn_before_it_is_needed() -> None:
    drawn: list[int] = []

    def init(generator: np.random.Generator, count: int) -> Array:
        drawn.append(count)
        return np.ones(count, np.float32)

    model = nn.Sequential(nn.Linear(3, 4, init=init), nn.Linear(4, 2, init=init))
    assert drawn == []
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(4, 3\) has no values yet"):
        _ = model.parameters()[0].data
    assert [p.shape for p in model.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    model(np.ones((1, 3), "float32"))
    assert drawn == [12, 8]
    model(np.ones((1, 3), "float32"))
    model.materialise()
    assert drawn == [12, 8], "drawn again"


@pytest.mark.parametrize(
    "make", [lambda: nn.MLP([5, 6, 3], seed=3), lambda: gpt(seed=3), lambda: gpt(seed=3, tied=False)]
)
def test_values_do_not_depend_on_the_order_of_drawing(make: Callable[[], Module]) -> None:
    model = make()
    model.name_parameters()
    for parameter in reversed(model.parameters()):
        flat = xp.empty(parameter.size, parameter.dtype)
        parameter.fill(flat, model.seed)
        parameter.bind(flat.reshape(parameter.shape))
    assert equal(values(make()), {name: host(parameter) for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("stage", mz.STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_values_and_loss_are_the_same_with_an_engine_and_without(stage: type[mz.Engine], dtype: str) -> None:
    tokens = np.array([[0, 1, 2], [3, 4, 0]])
    engine = stage(gpt(seed=3, dtype=dtype), mz.SGD(0.1))
    alone = gpt(seed=3, dtype=dtype)
    assert same_bits(host(engine(tokens)), host(alone(tokens)))
    assert equal(engine.gather_parameters(), values(alone))


def test_values_follow_from_seed_and_path_alone() -> None:
    small, large = values(nn.MLP([5, 6, 3], seed=3)), values(nn.MLP([5, 6, 3, 8], seed=3))
    assert equal(small, {name: large[name] for name in small}), "another layer changed the values of these"
    other = values(nn.MLP([5, 6, 3], seed=4))
    assert not any(same_bits(small[name], other[name]) for name in small)

    square = values(nn.MLP([6, 6, 6, 6], seed=3))
    assert not same_bits(square["layers.0.weight"], square["layers.1.weight"])
    assert not np.isin(square["layers.0.weight"], square["layers.1.weight"]).any(), "two layers share their numbers"
    inner = nn.Sequential(nn.MLP([5, 6, 3], seed=99), seed=3)
    assert not same_bits(values(inner)["layers.0.layers.0.weight"], small["layers.0.weight"]), "another path"


def test_rank_and_stage_leave_no_trace_in_the_values_and_rank_0_decides() -> None:
    done = run_ranks(3, ROOT / "tests" / "jobs" / "nn_draw.py")
    assert done.stdout == "rank 0's values everywhere, and everyone's own noise\n"


def test_bfloat16_values_are_the_float32_ones_rounded() -> None:
    wide, narrow = values(gpt(seed=1)), values(gpt(seed=1, dtype="bfloat16"))
    assert all(same_bits(wide[name].astype(bfloat16), narrow[name]) for name in wide)


def test_distributions_are_what_their_names_say() -> None:
    generator = np.random.default_rng(0)
    drawn = uniform(0.25)(generator, 40_000)
    assert drawn.dtype == np.float32 and -0.25 <= drawn.min() < -0.2499 and 0.2499 < drawn.max() <= 0.25
    assert abs(drawn.mean()) < 0.003
    drawn = normal(0.5)(generator, 40_000)
    assert drawn.dtype == np.float32 and abs(drawn.std() - 0.5) < 0.01 and abs(drawn.mean()) < 0.01
    assert constant(3)(generator, 4).tolist() == [3, 3, 3, 3]

    model = gpt(width=64, vocab=200)
    found = values(model)
    for name, array in found.items():
        kind = name.split(".")[-1]
        if kind == "weight":
            assert abs(array.std() - 0.02) < 0.004, name
        else:
            assert (array == (kind == "gain")).all(), name
    layer = values(nn.Linear(100, 400))
    assert all(0.09 < np.abs(array).max() <= 0.1 for array in layer.values()), "uniform, with 1/sqrt(inputs) as bound"


def test_a_parameter_larger_than_a_block_has_no_repetition_or_gap() -> None:
    found = values(nn.Linear(3 * DRAW_BLOCK + 5, 1, bias=False))["weight"].reshape(-1)
    assert np.unique(found[: 2 * DRAW_BLOCK]).size > 1.98 * DRAW_BLOCK, "a block was drawn twice"
    assert (found != 0).all()


def test_state_before_materialise_is_kept() -> None:
    model = nn.MLP([3, 2, 2])
    model.parameters()[0].bind(xp.full((2, 3), 7, "float32"))
    found = values(model)
    assert (found["layers.0.weight"] == 7).all()
    assert same_bits(found["layers.1.weight"], values(nn.MLP([3, 2, 2]))["layers.1.weight"])


# Names and units.


class Tree(Module):
    """Parameters and modules in attributes, lists, tuples and dicts, some of them shared."""

    def __init__(self) -> None:
        self.scale = Parameter((3,), constant(1))
        self.pair = (nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.parts = {"left": nn.Linear(3, 3), "right": nn.LayerNorm(3)}
        self.tables = [Parameter((2,), constant(0)), Parameter((4,), constant(0))]
        self.again = self.parts["left"]
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(3, 3), F.relu), nn.MLP([3, 3, 3]))
        self.deep.layers[0].layers[0].bias = self.pair[0].bias  # type: ignore[attr-defined]
        self.empty = nn.Dropout(0.5)
        self.other = ["text", 3, None]


NAMES = [
    "scale", "tables.0", "tables.1", "pair.0.weight", "pair.0.bias", "pair.1.weight", "parts.left.weight",
    "parts.left.bias", "parts.right.gain", "parts.right.bias", "deep.layers.0.layers.0.weight",
    "deep.layers.1.layers.0.weight", "deep.layers.1.layers.0.bias", "deep.layers.1.layers.1.weight",
    "deep.layers.1.layers.1.bias",
]  # fmt: skip


def test_parameters_are_named_by_their_paths_and_shared_ones_by_the_first() -> None:
    tree = Tree()
    assert [name for name, _ in tree.named_parameters()] == NAMES
    assert len({id(parameter) for parameter in tree.parameters()}) == len(NAMES)
    modules = dict(tree.named_modules())
    assert list(modules)[:5] == ["", "pair.0", "pair.1", "parts.left", "parts.right"]
    assert "again" not in modules and modules["empty"] is tree.empty


def test_units_are_the_children_with_parameters_in_order_of_use_and_each_once() -> None:
    assert [name for name, _ in Tree().units()] == ["pair.0", "pair.1", "parts.left", "parts.right", "deep"]
    assert [name for name, _ in gpt(layers=2).units()] == ["token", "position", "blocks.0", "blocks.1", "norm", "head"]
    assert [name for name, _ in nn.MLP([2, 2, 2]).units()] == ["layers.0", "layers.1"]
    assert nn.Linear(2, 2).units() == []


def unit_names(model: Module) -> dict[str, list[str]]:
    model.name_parameters()
    return {unit.name: [p.name for p in unit.parameters] for unit in units_of(model, 0, 2)}


def test_what_units_share_or_the_model_holds_is_the_root_unit_and_comes_first() -> None:
    units = unit_names(Tree())
    assert list(units) == ["(root)", "pair.0", "pair.1", "parts.left", "parts.right", "deep"]
    assert units["(root)"] == ["scale", "tables.0", "tables.1", "pair.0.bias"]
    assert units["pair.0"] == ["pair.0.weight"], "its bias is shared with `deep`"
    assert sorted(name for members in units.values() for name in members) == sorted(NAMES), "each in one unit"

    tied, untied = unit_names(gpt()), unit_names(gpt(tied=False))
    assert list(tied) == ["(root)", "position", "blocks.0", "norm"] and tied["(root)"] == ["token.weight"]
    assert list(untied) == ["token", "position", "blocks.0", "norm", "head"]
    assert unit_names(nn.Linear(2, 2)) == {"(root)": ["weight", "bias"]}
    root = units_of(tree := Tree(), 0, 2)[0]
    assert root.module is tree


def test_frozen_parameters_and_other_dtypes_are_units_of_their_own() -> None:
    model = nn.MLP([2, 2, 2])
    model.layers[1].weight.requires_grad = False
    model.layers[0].bias = Parameter((2,), constant(0), "float64")
    assert unit_names(model) == {
        "layers.0 (float32)": ["layers.0.weight"],
        "layers.0 (float64)": ["layers.0.bias"],
        "layers.1 (frozen)": ["layers.1.weight"],
        "layers.1": ["layers.1.bias"],
    }


def test_a_tied_weight_is_one_parameter_counted_once() -> None:
    tied, untied = gpt(), gpt(tied=False)
    assert tied.head.weight is tied.token.weight
    sizes = [sum(p.size for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == TINY["vocab"] * TINY["width"]
    block = 4 * 4 + 4 * (4 * 4 + 4) + (16 * 4 + 16) + (4 * 16 + 4)
    assert sizes[0] == 5 * 4 + 4 * 4 + block + 2 * 4
    engine = mz.Zero2(tied, mz.Adam())
    assert engine.memory()["weights"] == 4 * sizes[0]
    assert len(engine.gather_parameters()) == len(untied.parameters()) - 1


# Training and evaluation, and dropout.


def test_train_and_eval_reach_every_module() -> None:
    tree = Tree()
    tree.eval()
    assert not any(module.training for _, module in tree.named_modules())
    tree.train()
    assert all(module.training for _, module in tree.named_modules())


def test_dropout_drops_as_often_as_it_says_and_does_nothing_in_evaluation() -> None:
    dropout, x = nn.Dropout(0.3), np.ones((100, 100), "float32")
    out = host(dropout(x))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    assert abs((out == 0).mean() - 0.3) < 0.02
    assert not (out == host(dropout(x))).all(), "the second call has the noise of the first"
    dropout.eval()
    tensor = Tensor(x)
    assert dropout(tensor) is tensor
    dropout.train()
    dropout.p = 0.0
    assert dropout(tensor) is tensor


def test_noise_depends_on_each_of_its_five_numbers_and_nothing_else() -> None:
    def first(seed: int, rank: int, step: int, micro_batch: int, call: int) -> float:
        noise = nn.Noise(seed, rank)
        noise.at(step, micro_batch)
        for _ in range(call):
            generator = noise.generator()
        return float(generator.random())

    place = (1, 2, 3, 4, 5)
    assert first(*place) == first(*place) == np.random.default_rng(place).random()
    neighbours = [tuple(n + (i == j) for j, n in enumerate(place)) for i in range(5)]
    assert len({first(*each) for each in [place, *neighbours]}) == 6


# What layers compute.


def attention_by_hand(layer: nn.CausalSelfAttention, x: Array) -> Array:
    """Head by head, token by token."""
    v = {name: host(parameter) for name, parameter in layer.named_parameters()}
    queries, keys, contents = (x @ v[f"{name}.weight"].T + v[f"{name}.bias"] for name in ("query", "key", "value"))
    size = x.shape[-1] // layer.heads
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        for head in range(layer.heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(x.shape[1]):
                scores = keys[b, : t + 1, part] @ queries[b, t, part] / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[b, t, part] = weights / weights.sum() @ contents[b, : t + 1, part]
    return out @ v["out.weight"].T + v["out.bias"]


def test_attention_is_what_its_formula_says() -> None:
    layer = nn.CausalSelfAttention(6, 3, "float64")
    x = np.random.default_rng(0).standard_normal((2, 5, 6))
    layer.materialise()
    for i, parameter in enumerate(layer.parameters()):
        parameter.bind(xp.asarray(np.random.default_rng(i).standard_normal(parameter.shape)))
    np.testing.assert_allclose(host(layer(Tensor(xp.asarray(x)))), attention_by_hand(layer, x), rtol=1e-12, atol=1e-12)


def normalised(x: Array, layer: nn.LayerNorm) -> Array:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
    return x * host(layer.gain) + host(layer.bias)


def block_by_hand(block: nn.Block, x: Array) -> Array:
    x = x + attention_by_hand(block.attention, normalised(x, block.norm1))
    h = normalised(x, block.norm2) @ host(block.up.weight).T + host(block.up.bias)
    h = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return x + h @ host(block.down.weight).T + host(block.down.bias)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_is_its_blocks_between_embeddings_and_projection(tied: bool) -> None:
    model = gpt(layers=2, tied=tied, dtype="float64")
    model.materialise()
    for i, parameter in enumerate(model.parameters()):
        parameter.bind(xp.asarray(np.random.default_rng(i).standard_normal(parameter.shape)))
    tokens = np.array([[0, 3, 3], [4, 0, 2]])
    x = host(model.token.weight)[tokens] + host(model.position.weight)[:3]
    for block in model.blocks:
        x = block_by_hand(block, x)
    x = normalised(x, model.norm) @ host(model.token.weight if tied else model.head.weight).T
    np.testing.assert_allclose(host(model(tokens)), x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False])
def test_a_later_token_changes_no_earlier_logit(tied: bool) -> None:
    model = gpt(vocab=11, context=7, width=8, layers=2, tied=tied)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 7))
    logits = host(model(tokens))
    for t in range(7):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % 11
        now = host(model(changed))
        assert (now[:, :t] == logits[:, :t]).all(), f"token {t} changed what comes before it"
        assert all((now[:, i] != logits[:, i]).any() for i in range(t, 7)), f"token {t} does not reach what follows"


def test_gpt_has_logits_for_each_token_and_refuses_more_than_its_context() -> None:
    model = gpt()
    for batch, time in ((1, 1), (3, 2), (2, 4)):
        out = model(np.zeros((batch, time), "int64"))
        assert out.shape == (batch, time, 5) and out.dtype == np.float32
    with pytest.raises(ValueError, match="5 tokens in a row, but its context is 4"):
        model(np.zeros((1, 5), "int64"))
    with pytest.raises(IndexError, match="tokens must lie in 0 to 4, found 5"):
        model(np.full((1, 2), 5))
    assert gpt(dtype="bfloat16")(np.zeros((1, 2), "int64")).dtype == np.float32


def test_mlp_is_linear_layers_with_relu_between() -> None:
    model = nn.MLP([3, 5, 4, 2], dtype="float64")
    v, x = values(model), np.random.default_rng(0).standard_normal((6, 3))
    h = x
    for i in range(3):
        h = h @ v[f"layers.{i}.weight"].T + v[f"layers.{i}.bias"]
        h = np.maximum(h, 0) if i < 2 else h
    np.testing.assert_allclose(host(model(x)), h, rtol=1e-13)
    assert model(x[0]).shape == (2,) and model(np.ones((2, 3, 3))).shape == (2, 3, 2)


def test_layer_norm_has_mean_0_and_variance_1_before_gain_and_bias() -> None:
    layer = nn.LayerNorm(50, eps=0.0, dtype="float64")
    out = host(layer(np.random.default_rng(0).standard_normal((4, 50)) * 9 + 5))
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(out.var(-1), 1, rtol=1e-12)


def test_wrong_models_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"MLP needs at least an input and an output size, got \[3\]"):
        nn.MLP([3])
    with pytest.raises(ValueError, match="width 6 is not a multiple of 4 heads"):
        nn.CausalSelfAttention(6, 4)
    with pytest.raises(TypeError, match="dtype 'float16' is not supported"):
        nn.Linear(2, 2, dtype="float16")
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        Module()(1)
    assert nn.Linear(2, 3, bias=False).bias is None and len(nn.Linear(2, 3, bias=False).parameters()) == 1


# Gradients, against finite differences in float64.


class FixedDropout(Module):
    """Dropout between two layers; every forward draws the same noise."""

    def __init__(self) -> None:
        self.layer, self.last = nn.Linear(3, 8, dtype="float64"), nn.Linear(8, 2, dtype="float64")
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Any) -> Tensor:
        self.dropout.noise = nn.Noise(seed=3)
        return self.last(self.dropout(self.layer(x)))


class FixedBlock(Module):
    def __init__(self) -> None:
        self.block = nn.Block(4, 2, dropout=0.3, dtype="float64")

    def forward(self, x: Any) -> Tensor:
        self.block.dropout.noise = nn.Noise(seed=3)
        return self.block(x)


TOKENS = np.array([[0, 3, 3, 1], [4, 0, 2, 2]])
LAYERS: list[tuple[str, Callable[[], Module], Any]] = [
    ("Linear", lambda: nn.Linear(3, 4, dtype="float64"), (5, 3)),
    ("Linear, no bias, more axes", lambda: nn.Linear(3, 4, bias=False, dtype="float64"), (2, 5, 3)),
    ("Linear, one example", lambda: nn.Linear(3, 4, dtype="float64"), (3,)),
    ("Embedding", lambda: nn.Embedding(5, 3, "float64"), TOKENS),
    ("LayerNorm", lambda: nn.LayerNorm(6, dtype="float64"), (2, 3, 6)),
    ("Dropout", FixedDropout, (4, 3)),
    ("CausalSelfAttention", lambda: nn.CausalSelfAttention(4, 2, "float64"), (2, 3, 4)),
    ("Block", lambda: nn.Block(4, 2, dtype="float64"), (2, 3, 4)),
    ("Block with dropout", FixedBlock, (2, 3, 4)),
    ("Sequential", lambda: nn.Sequential(nn.Linear(3, 4, dtype="float64"), F.gelu), (5, 3)),
    ("MLP", lambda: nn.MLP([3, 6, 5, 2], dtype="float64"), (7, 3)),
    ("GPT tied", lambda: gpt(dtype="float64"), TOKENS),
    ("GPT untied", lambda: gpt(dtype="float64", tied=False), TOKENS),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given"), [pytest.param(make, given, id=name) for name, make, given in LAYERS])
def test_gradients_are_those_of_finite_differences(make: Callable[[], Module], given: Any) -> None:
    """All elements of small leaves, 20 of large ones, and of each leaf one direction in which all elements count."""
    generator = np.random.default_rng(0)
    model = make()
    model.materialise()
    for parameter in model.parameters():  # not 0 or 1, and not so small that attention is uniform
        parameter.bind(xp.asarray(generator.standard_normal(parameter.shape) * 0.7))
    leaves: dict[str, Tensor] = dict(model.named_parameters())
    x: Any = given
    if isinstance(given, tuple):
        x = leaves["input"] = Tensor(xp.asarray(generator.standard_normal(given)), requires_grad=True)
    weights = xp.asarray(generator.standard_normal(model(x).shape))

    def loss() -> Tensor:
        return (model(x) * weights).sum()

    def slope(leaf: Tensor, direction: Array) -> float:
        step, start = 1e-6, leaf.data.copy()
        ends = []
        for sign in (1, -1):
            leaf.data[...] = start + sign * step * xp.asarray(direction)
            ends.append(loss().item())
        leaf.data[...] = start
        return (ends[0] - ends[1]) / (2 * step)

    loss().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient"
        gradient = host(leaf.grad)
        assert gradient.shape == leaf.shape and gradient.dtype == np.float64, (
            f"{name}: {gradient.dtype} {gradient.shape}"
        )
        assert np.abs(gradient).max() > 1e-6 or name.endswith("key.bias"), f"{name}: nothing depends on it"
        scale = max(1.0, float(np.abs(gradient).max()))
        for i in generator.permutation(leaf.size)[:20]:
            direction = np.zeros(leaf.shape)
            direction.reshape(-1)[i] = 1
            assert abs(slope(leaf, direction) - gradient.reshape(-1)[i]) < 1e-7 * scale * 10, f"{name}, element {i}"
        direction = generator.standard_normal(leaf.shape)
        assert abs(slope(leaf, direction) - (direction * gradient).sum()) < 1e-6 * scale * leaf.size, name
