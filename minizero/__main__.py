"""The command line: is my machine ready, and will it fit?

    python -m minizero doctor                   # this machine
    mpirun -n 8 python -m minizero doctor       # ... and the launcher, and every rank
    python -m minizero plan --params 13e9       # bytes per rank, stage by stage: see plan_report.py

A check is a function of the world communicator that returns one line: a name, a verdict and a text. All ranks
run every check, since some are collective, and get the same lines; rank 0 prints them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_info

from . import __version__, backend, plan_report, ring
from .backend import xp
from .comm import Communicator
from .job import launched_ranks
from .transport import FORCE, cuda_aware

OK, ADVICE, BROKEN = "ok", "advice", "broken"
Line: TypeAlias = tuple[str, str, str]


def python(world: MPI.Comm) -> Line:
    found = f"Python {platform.python_version()}, minizero {__version__} from {Path(__file__).parent}"
    return "python", OK, by_rank(world, found)


def blas(world: MPI.Comm) -> Line:
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    names = ", ".join(sorted({f"{pool['internal_api']} {pool['version']}" for pool in pools}))
    threads = max((pool["num_threads"] for pool in pools), default=1)  # Accelerate is not seen, but obeys backend
    text = by_rank(world, f"NumPy {np.__version__}, {names or 'unknown BLAS'}, threads per rank: {threads}")
    if world.allreduce(threads, MPI.MAX) > 1:
        return "numpy", BROKEN, f"{text}. Only one gives repeatable bits: call no threadpool_limits yourself"
    return "numpy", OK, text


def library(world: MPI.Comm) -> Line:
    return "mpi", OK, by_rank(world, f"{library_name()}, loaded from {library_path()}")


def launcher(world: MPI.Comm) -> Line:
    """Do the processes that were started know of each other, and would those that mpirun starts?"""
    mpirun, family = world.bcast(find_mpirun() if world.rank == 0 else ("", ""))
    found = f"mpirun is {mpirun}, of {family}" if mpirun else "no mpirun is on PATH"
    own = Path(sys.executable).with_name("mpirun")
    mend = (
        f"put the bin directory of {library_name()}, which mpi4py loaded, first on PATH, "
        "or set MPI4PY_LIBMPI to the libmpi.so of your mpirun"
    )
    if world.size == 1 and launched_ranks() > 1:
        text = f"{launched_ranks()} processes were started, but each is rank 0 of 1 ({found}): {mend}"
        return "launcher", BROKEN, text
    if world.size > 1:
        return "launcher", OK, f"ranks: {world.size}; {found}"
    other = mpirun != "" and ("Open MPI" in family) != ("Open MPI" in library_name())
    if own.exists() and not (mpirun and own.samefile(mpirun)):
        text = f"{found}, but this environment has its own: source {own.parent}/activate"
        return "launcher", BROKEN if other else ADVICE, text
    if not mpirun:
        return "launcher", ADVICE, f"{found}: load your site's MPI module, or pip install mpich"
    if other:
        return "launcher", BROKEN, f"{found}; each of its processes would be rank 0 of 1, or abort: {mend}"
    return "launcher", OK, f"{found}; to try it: mpirun -n 4 python -m minizero doctor"


def cores(world: MPI.Comm) -> Line:
    """Launchers may bind each rank to some cores: the union of those is what a node's ranks may use."""
    mine = os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))
    nodes: dict[str, list[set[int]]] = {}
    for node, usable in world.allgather((MPI.Get_processor_name(), set(mine))):
        nodes.setdefault(node, []).append(usable)
    counts = {node: (len(ranks), len(set[int]().union(*ranks))) for node, ranks in nodes.items()}
    text = "; ".join(f"{node}: ranks {ranks}, cores {usable}" for node, (ranks, usable) in counts.items())
    if any(ranks > usable for ranks, usable in counts.values()):
        return "cores", ADVICE, f"{text}. Results will be right, but ranks take turns: do not trust timings"
    return "cores", OK, text


def device(world: MPI.Comm) -> Line:
    """Who has which GPU, and how many ranks have the same?"""
    text = by_rank(world, f"{backend.name} on {backend.device}{backend.device_facts()}")
    if backend.name == "cupy":
        takers = Counter(world.allgather((MPI.Get_processor_name(), backend.device)))
        if max(takers.values()) > 1:
            text += (
                f". Up to {max(takers.values())} ranks share a GPU: they take turns (do not trust timings), share its "
                "memory, and each takes a few hundred MB for its own CUDA context. Results will be right"
            )
            return "device", ADVICE, text
    unused = backend.name == "numpy" and os.environ.get("MINIZERO_BACKEND", "auto") == "auto"
    if unused and shutil.which("nvidia-smi"):
        why = "CuPy finds no usable one" if find_spec("cupy") else "pip install 'cupy-cuda12x[ctk]' (or cuda13x)"
        return "device", ADVICE, f"{text}. If nvidia-smi shows a GPU: {why}"
    return "device", OK, text


def transport(world: MPI.Comm) -> Line:
    """Do messages go straight from one GPU's memory to another's?"""
    direct, why = cuda_aware()
    if backend.name == "numpy":
        return "transport", OK, "through the host's memory, where arrays are"
    text = by_rank(world, f"{'GPU memory is handed to MPI' if direct else 'through pinned host memory'} ({why})")
    if not direct and not os.environ.get(FORCE):
        text += f". Right everywhere, and slower than a CUDA-aware MPI; if this MPI is one, set {FORCE}=1"
    return "transport", OK, text


def bfloat16(world: MPI.Comm) -> Line:
    """1/3 rounds to 171/512: 8 significant bits, to even."""
    third = float(xp.asarray([1 / 3], "float32").astype(backend.bfloat16).astype("float32")[0])
    right = third == 171 / 512
    text = by_rank(world, "rounds as it should" if right else f"1/3 became {third}, not {171 / 512}")
    if world.allreduce(right, MPI.MIN):
        return "bfloat16", OK, text
    return "bfloat16", BROKEN, f"{text}: pip install --upgrade ml_dtypes numpy"


def messages(world: MPI.Comm) -> Line:
    """Ones go round the ring in every dtype; bfloat16 holds integers up to 256, so no more ranks send one."""
    comm = Communicator(world)
    failed = []
    for name, dtype in backend.DTYPES.items():
        vector = xp.full(1024 * comm.size, int(comm.rank < 256), "float32").astype(dtype)
        ring.all_reduce(comm, vector)
        if not (backend.to_host(vector).astype("float64") == min(comm.size, 256)).all():
            failed.append(name)
    text = by_rank(world, f"wrong sums of {', '.join(failed)}" if failed else "all-reduce is right in every dtype")
    if world.allreduce(len(failed)) == 0:
        return "ring", OK, text
    return "ring", BROKEN, f"{text}: try another MPI (pip install mpich), or MINIZERO_BACKEND=numpy on a GPU"


# `messages` comes last, and only where the launcher is right.
CHECKS = (python, blas, library, launcher, cores, device, transport, bfloat16)


def doctor(options: argparse.Namespace) -> int:
    """Print the verdicts. Collective. Returns the exit code: 1 if something is broken, else 0."""
    world = MPI.COMM_WORLD
    lines = [check(world) for check in CHECKS]
    if launched_ranks() == 1 or world.size > 1:  # else a Communicator would refuse, for the reason just found
        lines.append(messages(world))
    broken = any(verdict == BROKEN for _, verdict, _ in lines)
    if world.rank == 0 and (world.size > 1 or launched_rank() == 0):
        for name, verdict, text in lines:
            print(f"{verdict:7} {name:9} {text}")
        print("not ready: first mend what is broken" if broken else "ready", flush=True)
    return int(broken)


def plan(options: argparse.Namespace) -> int:
    """Print what plan_report.py says. Returns the exit code: 2 for what cannot be planned, else 0."""
    try:
        text, stream, code = plan_report.report(options), sys.stdout, 0
    except ValueError as error:
        text, stream, code = f"python -m minizero plan: {error}", sys.stderr, 2
    if MPI.COMM_WORLD.rank == 0:
        print(text, file=stream, flush=True)
    return code


def by_rank(world: MPI.Comm, mine: str) -> str:
    """What all ranks say, said once; by rank where they differ. Collective."""
    texts = world.allgather(mine)
    if len(set(texts)) == 1:
        return mine
    ranks = {text: [str(rank) for rank, other in enumerate(texts) if other == text] for text in texts}
    return "; ".join(f"rank {','.join(numbers)}: {text}" for text, numbers in ranks.items())


def library_name() -> str:
    first = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def library_path() -> str:
    maps = Path("/proc/self/maps")
    files = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    return next((file for file in files if Path(file).name.startswith(("libmpi.", "libmpich."))), "an unknown place")


def find_mpirun() -> tuple[str, str]:
    """The path of the mpirun on PATH, and whose it is by what it says of itself; empty if there is none."""
    mpirun = shutil.which("mpirun") or ""
    if not mpirun:
        return "", ""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return mpirun, f"an MPI that does not answer ({error})"
    signs = {"Open MPI": "Open MPI", "Intel": "Intel MPI", "HYDRA": "MPICH"}
    return mpirun, next((signs[sign] for sign in signs if sign in done.stdout + done.stderr), "an unknown MPI")


def launched_rank() -> int:
    """This process's number by the launcher's variables; MPI's is 0 for all where the two do not match."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m minizero", description="Tools beside the lessons.")
    commands: Any = parser.add_subparsers(required=True, metavar="doctor|plan")
    add = commands.add_parser("doctor", help="is my machine ready? alone, or under mpirun")
    add.set_defaults(run=doctor)
    add = commands.add_parser("plan", help="how many bytes will a rank hold, and does it fit?")
    plan_report.add_options(add)
    add.set_defaults(run=plan)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
