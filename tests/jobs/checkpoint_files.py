"""Load what another number of ranks saved, under each stage in turn, and save it again: are the files the same?

mpirun -n 3 python tests/jobs/checkpoint_files.py save|again DIRECTORY

`save` trains and saves; `again` loads DIRECTORY and saves anew. Rank 0 prints a hash of all files, which every stage
must share.
"""

import json
import sys
import tempfile
from pathlib import Path

from checkpoint_recipes import RECIPES, Loader, differences, digest, engines, state_of, train

import minizero as mz

comm = mz.Communicator()
what, root = sys.argv[1], Path(sys.argv[2])
beside = Path(comm.mpi.bcast(tempfile.mkdtemp() if comm.rank == 0 else ""))
found = {}
for recipe in RECIPES:
    if what == "save":
        engine = list(engines(recipe, comm))[comm.size % 4]
        loader = Loader()
        train(engine, loader, 3)
        found[recipe] = digest(engine.save(root / recipe, loader.state()))
        continue
    seen = []
    for number, engine in enumerate(engines(recipe, comm)):
        extra = engine.load(root / recipe)
        folder = engine.save(beside / recipe / str(number), extra)
        seen.append((state_of(engine), digest(folder)))
    for state, files in seen:
        assert not differences(state, seen[0][0]), f"{recipe}: stages loaded different states on {comm.size} ranks"
        assert files == seen[0][1], f"{recipe}: the stages' files differ on {comm.size} ranks"
    found[recipe] = seen[0][1]
comm.mpi.Barrier()
if comm.rank == 0:
    print(json.dumps(found))
