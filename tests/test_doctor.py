"""`python -m minizero doctor`: what it finds right, what it finds broken, and who says so."""

import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from launch import AWARE, STRICT, run_python, run_ranks
from minizero.__main__ import ADVICE, BROKEN, launcher, library_name

DOCTOR = ("-m", "minizero", "doctor")
NAMES = ["python", "numpy", "mpi", "launcher", "cores", "device", "transport", "bfloat16", "ring"]


def verdicts(stdout: str) -> dict[str, str]:
    *lines, _ = stdout.splitlines()
    return {name: verdict for verdict, name, *_ in map(str.split, lines)}


def test_one_process_is_ready() -> None:
    done = run_python(*DOCTOR)
    assert list(verdicts(done.stdout)) == NAMES
    assert BROKEN not in verdicts(done.stdout).values()
    assert done.stdout.endswith("\nready\n")
    assert "threads per rank: 1\n" in done.stdout


def test_three_ranks_are_ready_and_one_of_them_says_so() -> None:
    done = run_ranks(3, *DOCTOR)
    assert list(verdicts(done.stdout)) == NAMES
    assert done.stdout.count("ranks: 3;") == 1
    assert done.stdout.endswith("\nready\n")


def test_ranks_that_share_a_gpu_are_told_what_it_costs_and_how_messages_go() -> None:
    done = run_ranks(3, *DOCTOR, env={**STRICT, "STRICT_DEVICES": "2"})
    assert list(verdicts(done.stdout)) == NAMES and done.stdout.endswith("\nready\n")
    assert verdicts(done.stdout)["device"] == ADVICE and "Up to 2 ranks share a GPU" in done.stdout
    assert "rank 0,2: cupy on gpu 0 (" in done.stdout and "; rank 1: cupy on gpu 1 (" in done.stdout
    assert "through pinned host memory (MINIZERO_MPI_CUDA=0)" in done.stdout
    done = run_ranks(2, *DOCTOR, env=AWARE)
    assert verdicts(done.stdout)["device"] == verdicts(done.stdout)["transport"] == "ok"
    assert "GPU memory is handed to MPI (MINIZERO_MPI_CUDA=1)" in done.stdout


def test_a_launcher_of_another_mpi_is_broken() -> None:
    done = run_python(*DOCTOR, env={"PMI_SIZE": "8"}, check=False)
    assert done.returncode == 1
    assert verdicts(done.stdout)["launcher"] == BROKEN
    assert "8 processes were started, but each is rank 0 of 1" in done.stdout
    assert done.stdout.endswith("\nnot ready: first mend what is broken\n")


def test_under_open_mpis_launcher_another_library_is_named_before_it_starts() -> None:
    if "Open MPI" in MPI.Get_library_version():
        variable, code = "PMI_SIZE", "import minizero as mz; mz.Communicator()"
    else:
        variable, code = "OMPI_COMM_WORLD_SIZE", "import minizero"
    done = run_python("-c", code, env={variable: "8"}, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "mpirun" in last and "first on PATH" in last and "MPI4PY_LIBMPI" in last, done.stderr


def test_of_eight_processes_that_are_all_rank_0_only_the_first_speaks() -> None:
    done = run_python(*DOCTOR, env={"MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_RANK": "3"}, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_ranks_that_differ_are_told_apart() -> None:
    code = (
        "from mpi4py import MPI; from minizero.__main__ import by_rank; world = MPI.COMM_WORLD; "
        "text = by_rank(world, 'gpu' if world.rank == 1 else 'cpu'); world.rank or print(text)"
    )
    assert run_ranks(3, "-c", code).stdout.strip() == "rank 0,2: cpu; rank 1: gpu"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but this folder, and a Python that has no mpirun beside it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return folder


def install_mpirun(folder: Path, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "mpirun").write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / "mpirun").chmod(0o755)


def test_an_mpirun_of_another_mpi_is_found_before_it_is_used(site: Path) -> None:
    install_mpirun(site, "HYDRA" if "Open MPI" in library_name() else "mpirun (Open MPI) 5.0")
    _, verdict, text = launcher(MPI.COMM_SELF)
    assert verdict == BROKEN
    assert f"mpirun is {site}/mpirun, of" in text


def test_no_mpirun_is_worth_an_advice(site: Path) -> None:
    _, verdict, text = launcher(MPI.COMM_SELF)
    assert verdict == ADVICE
    assert "pip install mpich" in text


def test_an_environment_that_is_not_activated_is_worth_an_advice(site: Path) -> None:
    install_mpirun(Path(sys.executable).parent, "this environment's")
    _, verdict, text = launcher(MPI.COMM_SELF)
    assert verdict == ADVICE
    assert f"source {Path(sys.executable).parent}/activate" in text
