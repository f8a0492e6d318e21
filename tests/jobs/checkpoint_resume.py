"""Four steps, a checkpoint and two more steps are six steps; what one stage saves every other loads.

mpirun -n 3 python tests/jobs/checkpoint_resume.py DIRECTORY
"""

import sys
from pathlib import Path

import numpy as np
from checkpoint_recipes import EXAMPLES, RECIPES, Loader, differences, digest, engines, state_of, train

import minizero as mz

comm = mz.Communicator()
root = Path(sys.argv[1])
for recipe, k in zip(RECIPES, (3, 1, 2, 1), strict=True):
    straight, files = {}, {}
    for engine in engines(recipe, comm):
        train(engine, Loader(), 6, k)
        straight[type(engine)] = state_of(engine)

    for engine in engines(recipe, comm):
        loader, where = Loader(), root / f"{recipe} {k} {type(engine).__name__}"
        train(engine, loader, 4, k)
        assert 0 < loader.at < EXAMPLES, "this is to be the middle of an epoch"
        before = state_of(engine)
        folder = engine.save(where, extra={"loader": loader.state()})
        assert folder == where / "step-4", folder
        assert not differences(before, state_of(engine)), "saving changed something"
        files[type(engine)] = digest(folder)
        train(engine, loader, 2, k)  # saving does not disturb what goes on
        assert not differences(state_of(engine), straight[type(engine)]), f"{recipe}: saving left a trace"

    saver = mz.DataParallel
    assert all(each == files[saver] for each in files.values()), f"{recipe}: the stages' files differ: {files}"
    for engine in engines(recipe, comm):
        engine.optimizer.lr = 123.0
        engine.model.seed = engine.noise.seed = 99
        train(engine, Loader(), 1, k)  # what was there is to vanish
        engine.backward(engine(Loader().batch()).sum())  # also a gradient that no step has used
        loader = Loader()
        loader.restore(engine.load(root / f"{recipe} {k} {saver.__name__}")["loader"])
        title = f"{recipe}, k = {k}, saved by DP, resumed by {type(engine).__name__} on {comm.size} ranks"
        assert engine.steps == 4 and engine.optimizer.lr < 100, (title, engine.steps, engine.optimizer.lr)
        train(engine, loader, 2, k)
        wrong = differences(state_of(engine), straight[type(engine)])
        assert not wrong, f"{title}: not as if it had never stopped: {wrong}"
    start = engines(recipe, comm)
    first = state_of(next(start))
    moved = [name for name in first if name in straight[saver] and np.any(first[name] != straight[saver][name])]
    still = {name for name in first if name not in moved}
    assert (
        still
        == {"gpt": {"position.weight"}, "mixed": {"empty", "fixed", "unused.weight", "unused.bias"}}[
            recipe.split(",")[0]
        ]
    ), still
comm.mpi.Barrier()
if comm.rank == 0:
    print("resumed")
