"""The parts of a mesh, one by one, on 8 ranks: conjugate operations, slices, dropout, bad numbers, refusals, messages.

mpirun -n 8 python tests/jobs/mesh_parts.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from mesh_models import Problem, build, errors, flat, loss_of, train

import minizero as mz
from minizero import functional as F
from minizero import nn, point, ring
from minizero.agreement import exchange_facts
from minizero.backend import DTYPES, to_host, xp
from minizero.nn import constant, normal
from minizero.parameter import DRAW_BLOCK, Parameter
from minizero.pipeline import gpipe
from minizero.tensor_parallel import ColumnParallel, RowParallel, Slice
from oracle import Oracle, Vector, same_bits

world = mz.Communicator()
N, RANK = world.size, world.rank
MESH = mz.Mesh(world, 2, 2, 2)
GPT = Problem("gpt", 2, dropout=0.2)


def raises(kind: type[BaseException], *words: str, call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"rank {RANK}: {words} are missing in: {error}"
        return str(error)
    raise AssertionError(f"rank {RANK}: no {kind.__name__} with {words}")


# Gradients, by finite differences in float64. What is whole is the same on all ranks, and moves on all of them.


def total(comm: mz.Communicator, number: float) -> float:
    return float(exchange_facts(comm, number).sum())


def differences(comm: mz.Communicator, loss: Callable[[], float], array: Vector, whole: bool) -> Vector:
    """The gradient of the sum over ranks of `loss`, by this rank's `array`. Collective."""
    found = np.zeros(array.shape)
    for owner in [0] if whole else range(comm.size):
        for place in np.ndindex(array.shape):
            sides = []
            for step in (1e-6, -1e-6):
                if whole or comm.rank == owner:
                    array[place] += step
                sides.append(total(comm, loss()))
                if whole or comm.rank == owner:
                    array[place] -= step
            if whole or comm.rank == owner:
                found[place] = (sides[0] - sides[1]) / 2e-6
    return found


def gradients_of_the_conjugate_operations(comm: mz.Communicator) -> None:
    split, own = mz.Split(comm), np.random.default_rng([7, comm.rank])
    enter, leave, weights = split.enter(), split.leave(), own.standard_normal((3, 5))
    x = np.random.default_rng(7).standard_normal((3, 5))

    def by_own_path() -> mz.Tensor:  # each rank's loss depends on the whole x by its own path
        return (F.tanh(enter(leaf)) * weights).sum()

    leaf: Any = mz.Tensor(x, requires_grad=True)
    by_own_path().backward()
    wanted = differences(comm, lambda: by_own_path().item(), leaf.data, whole=True)
    np.testing.assert_allclose(to_host(leaf.grad), wanted, rtol=1e-7, atol=1e-8, err_msg="enter")

    def of_the_sum() -> mz.Tensor:  # the same number on all ranks: it counts once
        return (F.tanh(leave(leaf)) * np.arange(15.0).reshape(3, 5)).sum()

    leaf = mz.Tensor(own.standard_normal((3, 5)), requires_grad=True)
    of_the_sum().backward()
    wanted = differences(comm, lambda: of_the_sum().item() / comm.size, leaf.data, whole=False)
    np.testing.assert_allclose(to_host(leaf.grad), wanted, rtol=1e-7, atol=1e-8, err_msg="leave")
    assert enter(leaf).data is leaf.data, "entering copies"


def gradients_of_a_pair_and_of_attention(comm: mz.Communicator) -> None:
    """Through a whole module, for its input and for each of its parameters."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            split = mz.Split(comm)
            self.up = ColumnParallel(3, 4, split, "float64", normal(0.5))
            self.down = RowParallel(4, 3, split, "float64", normal(0.5))

        def forward(self, x: Any) -> mz.Tensor:
            return self.down(F.gelu(self.up(x)))

    for module in (Pair(), nn.CausalSelfAttention(4, 4, "float64", mz.Split(comm))):
        width = 3 if isinstance(module, Pair) else 4
        for _, parameter in module.named_parameters():
            parameter.init = normal(0.5)
        module.materialise()
        leaf = mz.Tensor(np.random.default_rng(3).standard_normal((1, 2, width)), requires_grad=True)
        c = np.random.default_rng(4).standard_normal((1, 2, width))

        def loss() -> mz.Tensor:
            return (F.tanh(module(leaf)) * c).sum()  # noqa: B023

        loss().backward()
        tensors: list[Any] = [leaf, *module.parameters()]
        for tensor in tensors:
            wanted = differences(comm, lambda: loss().item() / comm.size, tensor.data, not isinstance(tensor, Slice))
            what = f"{type(module)} {getattr(tensor, 'name', 'input')}"
            np.testing.assert_allclose(to_host(tensor.grad), wanted, rtol=1e-6, atol=1e-8, err_msg=what)


def slices_are_those_of_the_whole(comm: mz.Communicator) -> None:
    """At any size of the group, along any axis, also where drawing takes several blocks."""
    for axis, shape in ((0, (8, 3)), (1, (5, 16)), (0, (24,)), (1, (1200, 24)), (0, (48, 1000)), (1, (2, 8, 4))):
        whole = Parameter(shape, normal(1.0), "float64")
        mine = Slice(whole, axis, mz.Split(comm))
        mine.name = whole.name = f"some.path.{axis}"
        drawn = [xp.full(p.size, np.nan) for p in (whole, mine)]
        whole.fill(drawn[0], 5)
        mine.fill(drawn[1], 5)
        flats = [to_host(flat) for flat in drawn]
        wanted = np.split(flats[0].reshape(shape), comm.size, axis=axis)[comm.rank]
        assert same_bits(flats[1].reshape(mine.shape), np.ascontiguousarray(wanted)), f"{shape}, axis {axis}"
        assert flats[0].size < DRAW_BLOCK or abs(np.corrcoef(np.split(flats[0], 2))[0, 1]) < 0.02, "blocks repeat"
        given = np.arange(float(mine.size))
        mine.bind(xp.asarray(given.reshape(mine.shape)))
        mine.fill(drawn[1], 5)
        assert same_bits(to_host(drawn[1]), given), "values that it has are kept"
    raises(ValueError, f"tp = {comm.size} ranks cannot share attention heads", "1, 5, 25", call=lambda: mz.Split(
        comm).heads(25))  # fmt: skip


def groups_are_where_the_map_says() -> None:
    rows = str(MESH).splitlines()
    assert rows == [
        "      pp 0          pp 1",
        "        tp 0  tp 1    tp 0  tp 1",
        "dp 0       0     1       4     5",
        "dp 1       2     3       6     7",
    ], str(MESH)
    assert MESH.place(RANK) == (MESH.dp.rank, MESH.pp.rank, MESH.tp.rank) == (RANK // 2 % 2, RANK // 4, RANK % 2)
    for group, others in ((MESH.tp, {RANK ^ 1}), (MESH.dp, {RANK ^ 2}), (MESH.pp, {RANK ^ 4})):
        assert set(exchange_facts(group, RANK).ravel().tolist()) == {RANK, *others}
    for sizes in ((2, 2, 3), (0, 4, 2), (-2, -2, 2), (8, 8, 8)):
        raises(ValueError, "×".join(f" {a} {b} " for a, b in zip(("dp", "pp", "tp"), sizes, strict=True)).strip(),
               "there are 8", "2×2×2", call=lambda: mz.Mesh(world, *sizes))  # noqa: B023  # fmt: skip
    listed = raises(ValueError, call=lambda: mz.Mesh(world, 3, 1, 1)).split("fit: ")[1].split(", ")
    assert sorted(listed) == sorted(f"{a}×{b}×{8 // a // b}" for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= 8)


def dropout_draws_what_one_process_draws() -> None:
    """Replicated activations must lose the same elements on all tp ranks, and stages must not repeat each other's."""
    truth = Oracle(GPT.model("float64"), mz.SGD(0.5), 2)
    pipelines = {order: build(mz.Zero2, GPT, mz.SGD(0.5), MESH, "float64", **order) for order in ORDERS}
    for step in range(2):
        batches = [GPT.micro_batches(step, "float64", rank, 2) for rank in range(2)]
        truth.step(loss_of, batches, examples=[[len(y) for _, y in batch] for batch in batches])
        for order, pipeline in pipelines.items():
            mine = batches[MESH.dp.rank]
            for some in (mine,) if order else (mine[:3], mine[3:]):  # also in two calls
                pipeline.backward(some, [len(y) for _, y in some])
            pipeline.engine.step()
    assert truth.state == {name: {} for name in truth.gradients}
    for order, pipeline in pipelines.items():
        for name, error in errors(pipeline.engine, truth.weights).items():
            assert error < 1e-12, f"dropout, {dict(order)}: {name} is wrong by {error:.3g}"
    logits = GPT.model("float64")
    logits.name_parameters()
    for name, parameter in logits.named_parameters():
        parameter.bind(xp.asarray(truth.weights[name]))
    logits.eval()
    x = GPT.batch(9, "float64")[0]
    for pipeline in pipelines.values():
        pipeline.engine.model.eval()
        found = pipeline(x)
        assert (found is not None) == (MESH.pp.rank == 1)
        if found is not None:
            np.testing.assert_allclose(found.numpy(), logits(x).numpy(), rtol=1e-9, atol=1e-12)
            assert found.node is None


class Options(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))


ORDERS = (Options(), Options(order=gpipe), Options(accumulate=True))


def a_bad_number_anywhere_stops_everybody() -> None:
    """In a slice, in what all tp ranks hold, in either stage: the same error on every rank, and nothing changed."""
    problem = GPT._replace(dropout=0.0)
    for stage, (owner, name) in itertools.product(mz.STAGES, ((5, "blocks.1.up.weight"), (0, "blocks.0.norm1.gain"))):
        engine = build(stage, problem, mz.Adam(0.01), MESH, "float32").engine
        pipeline = mz.Pipeline(engine, MESH.pp, F.cross_entropy)
        train(pipeline, problem, 0, "float32")
        engine.step()
        before, sent = engine.gather_parameters(), MESH.dp.traffic["control"]
        train(pipeline, problem, 1, "float32")
        for unit in engine.units:
            for parameter, part in zip(unit.parameters, unit.own_parts(), strict=True):
                if owner == RANK and parameter.name == name and part.size:
                    part[0] = np.inf
        said = raises(FloatingPointError, name, "nothing was updated", call=engine.step)
        assert len({error for error in world.mpi.allgather(said)}) == 1, f"rank {RANK}: {said}"
        assert engine.clip_grad_norm(1.0) == np.inf, "the norm of the mesh is infinite on all ranks"
        assert engine.steps == 1 and MESH.dp.traffic["control"] > sent
        for key, x in engine.gather_parameters().items():
            assert same_bits(x, before[key]), f"{key} was updated"
        engine.zero_grad()
        train(pipeline, problem, 1, "float32")
        engine.step()


def what_does_not_fit_together_is_refused() -> None:
    model = Problem("gpt", 2)

    def engine(seed: int = 0, comm: mz.Communicator = MESH.dp, optimizer: mz.Optimizer | None = None) -> mz.Engine:
        whole = model.model("float32", mz.Split(MESH.tp))
        whole.seed = seed
        return mz.Zero1(mz.Stage(whole, MESH.pp), optimizer or mz.SGD(0.1), comm)

    raises(ValueError, "of the mesh differ from rank 0", "[4, 5, 6, 7]", "seed", call=lambda: engine(seed=RANK // 4))
    raises(ValueError, "[1, 3, 5, 7] of the mesh", call=lambda: engine(optimizer=mz.SGD(0.1 * (1 + RANK % 2))))
    raises(ValueError, "wrap another model than rank 0", "slice", call=lambda: engine(comm=world))
    slices = mz.Mesh(world, 4, 1, 2)
    part = Problem("gpt", 1).model("float32", mz.Split(slices.tp))
    raises(ValueError, "[1, 3, 5, 7] wrap another model", "slice", call=lambda: mz.Zero1(part, mz.SGD(0.1), world))
    holder = nn.Sequential(nn.Linear(3, 3), F.tanh, nn.Linear(3, 3))
    holder.scale = Parameter((1,), constant(1))  # type: ignore[attr-defined]
    raises(ValueError, "scale is used by the stages []", call=lambda: mz.Stage(holder, MESH.pp))
    raises(NotImplementedError, "Linear has no `pieces`", call=lambda: mz.Stage(nn.Linear(3, 3), MESH.pp))

    # Stages with other batches: the second one sees it, and the first one hears of it when it waits for the gradient.
    for seen, given in (("[2, 0, -1], stage 1 [3, 0, -1]", [None] * 2), ("[2, 0, 5], stage 1 [2, 0, 4]", [5, 5])):
        mesh = mz.Mesh(world.split(RANK % 4), 1, 2, 1)
        mesh.dp.beyond = None  # as groups without a Mesh, which compare nothing beforehand
        pipeline = build(mz.Zero1, model, mz.SGD(0.1), mesh, "float32")
        batch = model.micro_batches(0, "float32", 0, 1, 3 if "3" in seen and mesh.pp.rank else 2)
        examples: Any = None if given[0] is None else [each - mesh.pp.rank for each in given]
        raises(mz.CollectiveError, "all stages must have the same batch", seen,
               call=partial(pipeline.backward, batch, examples))  # fmt: skip
        assert not pipeline.live
    engine_alone = build(mz.Zero1, Problem("mlp", 2), mz.SGD(0.1), mz.Mesh(world, 4, 1, 2), "float32").engine
    x, y = Problem("mlp", 2).micro_batches(0, "float32", engine_alone.comm.rank, 4, 1)[0]
    engine_alone.backward(F.cross_entropy(engine_alone(x), y), examples=8 + RANK % 2)
    raises(RuntimeError, "the groups of the mesh had [32.0, 36.0] examples", call=engine_alone.step)


def other_models_and_batches_on_a_mesh_are_refused_everywhere() -> None:
    """Beforehand: later a rank would wait for another one for ever, or train on with wrong numbers."""
    model, t, p = Problem("gpt", 3), MESH.tp.rank, MESH.pp.rank

    def wrap(layers: int = 3, dtype: str = "float32", frozen: str = "-", split: bool = True) -> mz.Engine:
        whole = model._replace(layers=layers).model(dtype, mz.Split(MESH.tp) if split else None)
        for name, parameter in whole.named_parameters():
            parameter.requires_grad = not name.startswith(frozen)
        return mz.Zero1(mz.Stage(whole, MESH.pp), mz.SGD(0.1), MESH.dp)

    raises(ValueError, "[4, 5, 6, 7] of the mesh differ", "the model", call=lambda: wrap(layers=3 + p))
    for other in ({"layers": 3 + t}, {"dtype": ("float32", "bfloat16")[t]}, {"split": not t}):
        raises(ValueError, "[1, 3, 5, 7] of the mesh differ", "a model of", call=partial(wrap, **other))
    raises(ValueError, "of the mesh differ", call=lambda: wrap(frozen="-norm"[t:]))
    chain = nn.Sequential(nn.Linear(3, 3), F.tanh, F.relu)
    raises(ValueError, "stage 1 of 2 has no parameter to train", call=lambda: mz.Stage(chain, MESH.pp))
    chain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for _, parameter in chain.layers[0].named_parameters():  # type: ignore[attr-defined]
        parameter.requires_grad = False
    raises(ValueError, "stage 0 of 2 has no parameter to train", call=lambda: mz.Stage(chain, MESH.pp))

    pipeline = build(mz.Zero1, model, mz.SGD(0.1), MESH, "float32")
    planned = model.sizes(8, 2, p, 2).units  # three blocks in two stages
    assert [(unit.name, unit.size) for unit in pipeline.engine.units] == [(u.name, sum(u.parameters)) for u in planned]
    batch = model.micro_batches(0, "float32", MESH.dp.rank, 2, 2)
    for rank in range(N):  # with one micro-batch less, ranks would step while others go on: a knot of two rings
        fewer = batch[: 2 - (rank == RANK)]
        counts = str([2 - (each == rank) for each in range(N)])
        raises(ValueError, counts, "micro-batches", call=lambda: pipeline.backward(fewer))  # noqa: B023
    for what, wrong in (("x", "[0, 1, 2, 3]"), ("y", "[4, 5, 6, 7]")):  # the first stage uses x, the last one y
        mine = [(np.roll(x, t * (what == "x"), 0), np.roll(y, t * (what == "y"), 0)) for x, y in batch]
        raises(ValueError, f"ranks {wrong} of the mesh have not the same batch", call=lambda: pipeline.backward(mine))  # noqa: B023
    raises(ValueError, "have not the same batch", call=lambda: pipeline.backward(batch, [8 + t, 8]))
    for examples in ([8], [8, 8, 8]):
        raises(ValueError, "2 micro-batches and examples=[8", call=lambda: pipeline.backward(batch, examples))  # noqa: B023
    raises(ValueError, "0 micro-batches", call=lambda: pipeline.backward([]))
    right = pipeline.order
    for order in (lambda *given: gpipe(*given)[:-1], lambda *given: gpipe(*given)[::-1]):
        pipeline.order = order
        raises(ValueError, "forward and then backward once", call=lambda: pipeline.backward(batch))
    pipeline.order = right
    pipeline.backward(iter(batch))  # nothing has happened so far
    pipeline.engine.step()

    pair = world.split(RANK // 2)  # of equal size, but another layer's: the sum would be silently wrong
    split, x = mz.Split(pair), mz.Tensor(np.ones((2, 2)))
    layers = [split.leave(), split.leave()]
    raises(mz.CollectiveError, "all_reduce of row-parallel layer 0", "layer 1", call=lambda: layers[t](x))

    assert mz.Mesh(world.mpi, 2, 2, 2).sizes == (2, 2, 2)
    for size in (2.0, "2", None):
        raises(ValueError, "a mesh needs integers", call=lambda: mz.Mesh(world, size, 2, 2))  # type: ignore[arg-type]  # noqa: B023


def messages_between_two_ranks() -> None:
    """Every dtype, empty ones, large ones both ways at once; what differs or cannot be sent is refused, by name."""
    comm = world.split(RANK // 2)  # four pairs
    other = 1 - comm.rank
    arrays = [np.arange(5).astype(dtype) for dtype in (*DTYPES.values(), "int64", "uint8")]
    arrays += [np.zeros((0, 3), "float32"), np.full(1 << 20, comm.rank, "float64"), np.ones((2, 3), "float32")]
    for array in arrays:
        point.send(comm, xp.asarray(array), other)
    for array in arrays:
        found = point.receive(comm, other)
        assert found.shape == (array.size,) and found.dtype == array.dtype
        wanted = np.full(1 << 20, other, "float64") if array.size > 9 else array.reshape(-1)
        assert same_bits(to_host(found), wanted), f"rank {RANK}: {array.dtype}"
    assert comm.traffic == {"exchange": sum(array.nbytes for array in arrays)}
    raises(TypeError, "datetime64", call=lambda: point.send(comm, np.zeros(3, "datetime64[s]"), other))
    raises(ValueError, "not contiguous", call=lambda: point.send(comm, np.zeros((3, 3))[:, 0], other))
    with mock.patch.object(point, "LARGEST", 15):
        raises(ValueError, "16 bytes are more than the 15", call=lambda: point.send(comm, np.zeros(2), other))
    ring.all_reduce(comm, xp.ones(2))  # nothing is left over

    names = ("first", "second")
    with comm.label("pipeline", comm.rank, names):
        point.send(comm, np.ones(3), other)
        raises(mz.CollectiveError, f"rank {RANK ^ 1} is in pipeline of {names[other]} (float64), but rank {RANK} is in "
               f"pipeline of {names[comm.rank]}", call=lambda: point.receive(comm, other))  # fmt: skip
    raises(mz.CollectiveError, "is in pipeline of", call=lambda: point.receive(comm, other))
    raises(mz.CollectiveError, "is in pipeline of", call=lambda: point.send(comm, np.ones(3), other))
    raises(mz.CollectiveError, "is in pipeline of", call=lambda: ring.all_reduce(comm, xp.ones(2)))

    three = world.split(int(RANK < 3))  # 0 and 1 differ, 2 waits for 1
    if RANK < 2:
        with three.label("pipeline", RANK, names):
            point.send(three, np.ones(3), 1 - RANK)
            raises(mz.CollectiveError, "is in pipeline", call=lambda: point.receive(three, 1 - RANK))
    elif RANK == 2:
        raises(mz.CollectiveError, "rank 0 is in pipeline of first", "rank 1", call=lambda: point.receive(three, 1))


def local_accumulation_sends_once_and_holds_whole_gradients() -> None:
    """In Ψ(dp-1)/dp, k = 4: 2k, 2k + 1, k + 1, 3k with a reduction each time; 2, 3, 2, 2k + 1 with only the last."""
    problem, k = GPT._replace(dropout=0.0), 4
    for accumulate, formulas in ((False, (2 * k, 2 * k + 1, k + 1, 3 * k)), (True, (2, 3, 2, 2 * k + 1))):
        for stage, formula in zip(mz.STAGES, formulas, strict=True):
            held = list[int]()

            class Watched(mz.Pipeline):
                def run_backward(self, i: int, examples: int | None) -> None:
                    super().run_backward(i, examples)
                    held.append(self.engine.memory()["gradients"])  # noqa: B023

            pipeline = build(stage, problem, mz.Adam(0.01), MESH, "float32", Watched, accumulate=accumulate)
            psi = sum(unit.length for unit in pipeline.engine.units) * 4
            MESH.dp.traffic.clear()
            train(pipeline, problem, 0, "float32")
            pipeline.engine.step()
            sent = sum(MESH.dp.traffic.values()) - MESH.dp.traffic["control"]
            assert 2 * sent == formula * psi, f"{stage.__name__}, {accumulate=}: sent {sent}, Ψ {psi}"
            part = psi // (2 if stage in mz.STAGES[2:] else 1)
            assert held == ([psi] * 3 if accumulate else [part] * 3) + [part], f"{stage.__name__}: holds {held}"


def a_stage_that_ignores_its_input_sends_a_gradient_of_zeros() -> None:
    mesh = mz.Mesh(world.split(RANK // 2), 1, 2, 1)
    chain = nn.Sequential(nn.Linear(3, 3), lambda x: x.detach(), nn.Linear(3, 3))
    engine = mz.Zero1(mz.Stage(chain, mesh.pp), mz.SGD(0.1), mesh.dp)
    mz.Pipeline(engine, mesh.pp, F.cross_entropy).backward([(np.ones((2, 3), "float32"), np.array([0, 2]))] * 2)
    moved = any(to_host(unit.gradient).any() for unit in engine.units)
    assert moved == (mesh.pp.rank == 1) and len(engine.units) == 1


def each_part_of_a_model_is_saved_and_goes_on_with_another_dp(folder: str) -> None:
    problem = Problem("gpt", 2)
    old = build(mz.Zero1, problem, mz.Adam(0.01), MESH, "bfloat16")
    for step in range(2):
        train(old, problem, step, "bfloat16")
        old.engine.step()
    final = old.engine.save(folder, extra={"at": 2})
    assert final.parent.name == f"pp{MESH.pp.rank}-tp{MESH.tp.rank}"
    wanted = flat(old.engine)
    half = mz.Mesh(world.split(int(MESH.dp.rank)), 1, 2, 2)
    new = build(mz.Zero3, problem, mz.Adam(0.5), half, "bfloat16")
    assert (half.pp.rank, half.tp.rank) == (MESH.pp.rank, MESH.tp.rank)
    for path in (folder, final):
        assert new.engine.load(path) == {"at": 2} and new.engine.steps == 2
        found = flat(new.engine)
        assert all(same_bits(x, found[name]) for name, x in wanted.items()), "what was loaded is not what was saved"
    wider = mz.Mesh(world, 4, 2, 1)
    other = build(mz.Zero1, problem, mz.Adam(0.01), wider, "bfloat16")
    raises(mz.CheckpointError, "does not fit: it differs in blocks.", call=lambda: other.engine.load(folder))


def everything() -> Iterator[Callable[[], None]]:
    yield groups_are_where_the_map_says
    for size in (2, 4):
        comm = world.split(RANK // size)
        yield lambda comm=comm: gradients_of_the_conjugate_operations(comm)  # type: ignore[misc]
        yield lambda comm=comm: slices_are_those_of_the_whole(comm)  # type: ignore[misc]
    comm = world.split(RANK // 2)
    yield lambda: gradients_of_a_pair_and_of_attention(comm)
    yield dropout_draws_what_one_process_draws
    yield a_bad_number_anywhere_stops_everybody
    yield what_does_not_fit_together_is_refused
    yield other_models_and_batches_on_a_mesh_are_refused_everywhere
    yield a_stage_that_ignores_its_input_sends_a_gradient_of_zeros
    yield messages_between_two_ranks
    with TemporaryDirectory() as own:
        folder = world.mpi.bcast(own)
        yield lambda: each_part_of_a_model_is_saved_and_goes_on_with_another_dp(folder)
        exchange_facts(world)
    yield local_accumulation_sends_once_and_holds_whole_gradients


done = 0
for check in everything():
    check()
    done += 1
if RANK == 0:
    print(f"{done} done")
