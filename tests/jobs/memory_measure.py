"""What the allocator saw of training, against what engines hold and against each other. One JSON line from rank 0.

With `flat`: a hundred steps instead, after which no more is alive than before.
"""

import gc
import json
import sys
from typing import Any

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import memory, nn
from minizero.backend import xp

comm = mz.Communicator()
rng = np.random.default_rng(comm.rank)


def mlp(layers: int, dtype: str, width: int = 256) -> tuple[nn.Module, Any, Any]:
    return nn.MLP([width] * (layers + 1), dtype=dtype), rng.random((4, width), np.float32), rng.integers(0, width, 4)


def gpt(layers: int, dtype: str) -> tuple[nn.Module, Any, Any]:
    model = nn.GPT(vocab=32, context=8, width=64, heads=4, layers=layers, dtype=dtype)
    return model, rng.integers(0, 32, (2, 8)), rng.integers(0, 32, (2, 8))


def train(engine: mz.Engine, x: Any, y: Any) -> None:
    loss = F.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()


def total(terms: memory.Terms) -> int:
    return sum(terms.values())


report: dict[str, Any] = {}


def peaks_of_all() -> None:
    for make in (mlp, gpt):
        for dtype in ("float32", "bfloat16") if make is mlp else ("bfloat16",):
            peaks, activations, temporary = [], [], {}
            for stage in mz.STAGES:
                for layers in (8, 16) if (make, dtype) == (mlp, "bfloat16") else (8,):
                    model, x, y = make(layers, dtype)
                    with memory.measure(timeline=stage is mz.Zero1 and dtype == "float32") as building:
                        engine = stage(model, mz.Adam(1e-3), comm)
                        assert building.live() == total(building.terms())
                        assert building.terms()["weights"] == engine.memory()["weights"]
                    assert set(building.peaks) == {"building"}, building.peaks.keys()
                    assert all(phase == "building" for phase, _ in building.events)
                    train(engine, x, y)
                    with memory.measure(engine) as seen:
                        loss = F.cross_entropy(engine(x), y)
                        engine.backward(loss)
                        del loss
                        rest, held = seen.terms(), engine.memory()
                        engine.step()
                        batch = xp.asarray(x) + xp.asarray(x)  # the user's own
                        assert seen.terms()["other"] == batch.nbytes
                        del batch
                    where = f"{make.__name__} {layers} {dtype} {stage.__name__}"
                    assert set(seen.peaks) >= {"forward", "backward", "step"}, where
                    assert {term: rest[term] for term in held} == held, f"{where}: at rest {rest}, held {held}"
                    assert rest["activations"] < 100, f"{where}: {rest} after backward"
                    for phase in ("forward", "backward", "step"):
                        terms = seen.peaks[phase]
                        assert terms["other"] <= 0.02 * total(terms), f"{where}: {phase} {terms}"
                        assert all(size >= 0 for size in terms.values()), f"{where}: {phase} {terms}"
                    temporary[layers] = max(
                        terms["temporary"] for terms in (*seen.peaks.values(), *building.peaks.values())
                    )
                    if layers == 8:
                        peaks.append(total(seen.peak))
                        activations.append(seen.activations)
                        state = sum(unit.length * (2 * unit.dtype.itemsize + 8) for unit in engine.units)
                        assert seen.activations < 0.1 * state or make is gpt, f"{where}: {seen.activations} of {state}"
                    if stage is mz.Zero3:
                        assert not any(unit.whole for unit in engine.units), where
                    del engine, model
                if 16 in temporary:
                    assert temporary[16] <= 1.02 * temporary[8], f"{dtype} {stage.__name__}: {temporary}"
            assert sorted(set(peaks), reverse=True) == peaks, (
                f"{make.__name__} {dtype}: peaks {peaks} are not in stage order"
            )
            assert len(set(activations)) == 1 and activations[0] > 0, f"{make.__name__} {dtype}: {activations}"
            report[f"{make.__name__} {dtype}"] = {"peaks": peaks, "activations": activations[0]}


def flat() -> None:
    for stage in mz.STAGES:  # live bytes are flat, and nothing stays gathered
        model, x, y = mlp(3, "bfloat16", width=32)
        engine = stage(model, mz.Adam(1e-3), comm)
        train(engine, x, y)
        gc.collect()
        gc.disable()
        with memory.measure(engine) as seen:
            train(engine, x, y)
            after_one = seen.live()
            for _ in range(100):
                train(engine, x, y)
            assert seen.live() == after_one, f"{stage.__name__}: {after_one} bytes live, 100 steps later {seen.live()}"
            with mz.no_grad():
                engine(x)
            assert seen.live() == after_one, f"{stage.__name__}: {seen.live() - after_one} bytes after an evaluation"
            try:
                engine.backward(F.cross_entropy(engine(x), y + 10**6))
            except IndexError:
                pass
            else:
                raise AssertionError("a label out of range was taken")
            engine.zero_grad()
            assert seen.live() == after_one, f"{stage.__name__}: {seen.live() - after_one} bytes after an exception"
        gc.enable()
        report[stage.__name__] = after_one


flat() if "flat" in sys.argv else peaks_of_all()
if comm.rank == 0:
    print(json.dumps(report))
