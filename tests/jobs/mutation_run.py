"""Plant each fault, run the battery, and say which verdicts turn red.

    mpirun -n 5 python tests/jobs/mutation_run.py ["name of a fault" ...]     # all, if none is named

Rank 0 prints a line of JSON for each.
"""

import json
import sys

from mutation_battery import battery, prepare
from mutation_faults import FAULTS

import minizero as mz

comm = mz.Communicator()
prepare(comm)
for name in sys.argv[1:] or FAULTS:
    with FAULTS[name]():
        verdict = battery(comm)
    reds, reasons = verdict.of_all_ranks(comm), comm.mpi.allgather(verdict.why)
    if comm.rank == 0:
        first = {kind: next(why[kind] for why in reasons if kind in why) for kind, red in reds.items() if red}
        print(json.dumps({"fault": name, **reds, "why": first}), flush=True)
