"""Train and save after every step, until killed; and say what the state should be after each step.

mpirun -n 3 python tests/jobs/checkpoint_loop.py train DIRECTORY      for ever; prints a line when saving has begun
mpirun -n 3 python tests/jobs/checkpoint_loop.py truth 60             a JSON list: a hash of the state after each step
python tests/jobs/checkpoint_loop.py look DIRECTORY DIRECTORY ...     a JSON list of [steps, hash] of what loads
"""

import hashlib
import json
import sys
from pathlib import Path

from checkpoint_recipes import RECIPES, Loader, state_of, train

import minizero as mz

model, optimizer = RECIPES["mixed, adam"]


def fingerprint(engine: mz.Engine) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for _, a in sorted(state_of(engine).items()))).hexdigest()


comm = mz.Communicator()
what, *given = sys.argv[1:]
if what == "look":
    found = []
    for where in given:
        other = mz.Zero3(model(), optimizer(), comm)
        other.load(where)
        found.append([other.steps, fingerprint(other)])
    print(json.dumps(found))
    sys.exit()

engine, loader = mz.Zero2(model(), optimizer(), comm), Loader()
if what == "truth":
    hashes = []
    for _ in range(int(given[0])):
        hashes.append(fingerprint(engine))
        train(engine, loader, 1)
    if comm.rank == 0:
        print(json.dumps(hashes))
    sys.exit()

if Path(given[0]).exists():
    loader.restore(engine.load(given[0]))
engine.save(given[0], loader.state(), keep_last=2)
if comm.rank == 0:
    print("saving", flush=True)
while True:
    train(engine, loader, 1)
    engine.save(given[0], loader.state(), keep_last=2)
