"""What do all lessons share that is not the lesson? Progress, tables, and the comparison of bits.

`Task` (in options.py) says what is trained, `Report` watches and speaks, and the loop stands in the lesson itself:

    for batch in report.steps(engine):
        for x, y in batch:                                  # the micro-batches of this rank's slice
            loss = F.cross_entropy(engine(x), y)
            engine.backward(loss, examples=len(y))
            report.loss(loss, len(y))
        report.at_rest()                                    # all that a step holds at rest is held now
        engine.step()

Nothing counts inside the framework. Bytes held are those of the arrays that `engine.memory()` finds, bytes sent
are what `comm.traffic` says was handed to MPI; THEORY is what both are compared with.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import minizero as mz
import pictures
from minizero import backend, memory, ring
from minizero.comm import MPI
from options import Task as Task
from saving import Saver

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress
except ImportError:  # the lessons do without: lines instead of a bar
    Progress = None  # type: ignore[assignment,misc]

TERMS = ("weights", "gradients", "optimizer")
MOMENTS = 8  # bytes per parameter: Adam's two float32 vectors


class Theory(NamedTuple):
    """A rank holds 1/N of the `sharded` terms, and sends k * `backward` + `step` times Ψ(N-1)/N bytes per step."""

    name: str
    sharded: tuple[str, ...]
    backward: int
    step: int
    formula: str


THEORY: dict[type[mz.Engine], Theory] = {
    mz.DataParallel: Theory("DP", (), 2, 0, "2k"),
    mz.Zero1: Theory("ZeRO-1", ("optimizer",), 2, 1, "2k + 1"),
    mz.Zero2: Theory("ZeRO-2", ("optimizer", "gradients"), 1, 1, "k + 1"),
    mz.Zero3: Theory("ZeRO-3", TERMS, 3, 0, "3k"),
}


class Run:
    """What was seen of one training."""

    def __init__(self, name: str, forward: Any) -> None:
        self.name, self.forward = name, forward
        self.theory = THEORY.get(type(forward))  # none for a stage of the reader's own
        self.memory: dict[str, int] = {}  # bytes at rest, the most over steps and ranks
        self.traffic: dict[str, int] = {}  # bytes sent in one step, likewise, by operation
        self.recorded: list[pictures.Step] = []  # one step's memory, for --plot
        self.facts: dict[str, Any] = {"loss": []}


class Report:
    """Watches trainings from outside, and tells rank 0's reader: in tables, or with --json as one object.

    Everything is collective where there is a `comm`. `facts` is what --json prints; lessons add theirs.
    """

    def __init__(self, file: str, task: Task, comm: mz.Communicator | None = None) -> None:
        self.task, self.comm, self.ranks = task, comm, comm.size if comm else 1
        self.speaks = MPI.COMM_WORLD.rank == 0 and not task.options.json
        self.runs: list[Run] = []
        self.saver = Saver(task.options)
        self._bar: Any = None
        mpi = " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0].split())
        self.facts: dict[str, Any] = {"lesson": Path(file).stem, "options": vars(task.options), "ranks": self.ranks,
                                      "backend": backend.name, "mpi": mpi, "runs": {}, "verdicts": {}}  # fmt: skip
        nodes, device = len(set(self.from_all(MPI.Get_processor_name()))), comm.device if comm else "one device"
        self.print(f"N = {self.ranks}, machine: {nodes} node{'s' * (nodes > 1)}, {backend.name} on {device}, {mpi}\n")

    def from_all(self, mine: Any) -> list[Any]:
        """Everybody's `mine`, by rank; every rank gets it."""
        if not self.comm:
            return [mine]
        sent = self.comm.traffic.copy()
        with self.comm.label("control"):  # MPI's allgather would wait for ever for a rank that has failed
            ring.all_gather(self.comm, backend.xp.zeros(self.ranks, "uint8"))
        self.comm.traffic.clear()
        self.comm.traffic.update(sent)  # this message is not the training's
        return self.comm.mpi.allgather(mine)

    def print(self, line: str = "", end: str = "\n") -> None:
        if self.speaks:
            print(line, end=end, flush=True)

    def steps(self, forward: Any, name: str = "") -> Iterator[list[tuple[Any, Any]]]:
        """Yield each step's micro-batches; note what a step sends; show how the loss falls, and the accuracy.

        `forward` is an engine, or a function from x to logits that needs a name.
        """
        name = name or (THEORY[type(forward)].name if type(forward) in THEORY else type(forward).__name__)
        first = self._resume(forward, name)
        run, bar = Run(name, forward), self._draw(name, first)
        self._run, self._bar, self._line = run, bar, ""
        sent = self.comm.traffic if self.comm else {}
        self._say(f"{name:9} loss")
        looks, saved = {first + round(i * (self.task.steps - first - 1) / 4) for i in range(5)}, ""
        for step, batch in enumerate(self.task.batches(self.comm.rank if self.comm else 0, self.ranks, first), first):
            self._look = step in looks
            self._losses, self._examples = 0.0, 0
            sent.clear()
            with self._recording(step - first, self.task.steps - first):
                yield batch
            run.traffic = most(run.traffic, sent)
            if isinstance(forward, mz.Engine):
                saved = self.saver.after(forward, name) or saved
            if bar:
                bar.advance(bar.task_ids[0])
        if bar:
            bar.stop()
            self.print(self._line, end="")
        accuracy = self.task.accuracy(forward)
        self.print(f"   accuracy {100 * accuracy:.1f} %{saved}")
        run.memory, run.traffic = most(*self.from_all(run.memory)), most(*self.from_all(run.traffic))
        run.facts["accuracy"], self.facts["runs"][name] = accuracy, run.facts
        self.runs.append(run)

    def _resume(self, forward: Any, name: str) -> int:
        """The step to begin with: with --resume the one after those of the checkpoint, which is loaded."""
        folder = self.saver.start(forward, name) if isinstance(forward, mz.Engine) else None
        if folder is None:
            return 0
        self.print(f"{name} goes on after {forward.steps} steps, from {folder}")
        return int(forward.steps)

    def _recording(self, step: int, steps: int) -> Any:
        """A context around a step, which costs nothing but for one step on rank 0 with --plot."""
        run, wanted = self._run, min(2, steps - 1)  # moments exist from the second step on
        if self.task.plot is None or step != wanted or MPI.COMM_WORLD.rank or not isinstance(run.forward, mz.Engine):
            return nullcontext()
        return pictures.recording(run.forward, run.recorded, run.name)

    @contextmanager
    def budget(self) -> Iterator[None]:
        """Inside, each rank has --budget bytes, if it is given, for what is built and trained there.

        Where that is too little: print what failed and why, and end with exit code 1.
        """
        if self.task.budget is None:
            yield
            return
        try:
            with memory.budget(self.task.budget, existing=False):
                yield
        except memory.OutOfMemory as error:
            if self._bar:
                self._bar.stop()
            found = memory.diagnose(error)
            self.print(f"\n\nout of memory: {error}\n\n{found}")
            self.facts["out_of_memory"] = {"error": str(error), "illness": found.illness, "cure": found.cure}
            self.end(code=1)

    def loss(self, loss: mz.Tensor, examples: int) -> None:
        """Note the loss of one micro-batch, the mean over so many examples."""
        if self._look:
            self._losses += loss.item() * examples
            self._examples += examples

    def at_rest(self) -> None:
        """After the last backward, before step: show the mean loss; from the second step on, note the bytes held."""
        run = self._run
        if self._look:
            parts = self.from_all((self._losses, self._examples))
            mean = sum(part for part, _ in parts) / max(sum(n for _, n in parts), 1)
            self._say(f"{' →' * bool(run.facts['loss'])} {mean:{'.3f' if abs(mean) < 1000 else '.3g'}}")
            run.facts["loss"].append(mean)
        if isinstance(run.forward, mz.Engine) and run.forward.steps > 0:
            run.memory = most(run.memory, run.forward.memory())

    def _draw(self, name: str, first: int) -> Any:
        """A progress bar, where there is rich and a terminal to draw on."""
        if not self.speaks or Progress is None or not on_terminal():
            return None
        console = Console(force_terminal=True)
        bar = Progress("{task.description}", BarColumn(), MofNCompleteColumn(), console=console, transient=True)
        bar.add_task(name, total=self.task.steps, completed=first)
        bar.start()
        console.show_cursor()  # Ctrl-C would leave it hidden
        return bar

    def _say(self, text: str) -> None:
        """Let the line grow: beside the bar, or else in place."""
        self._line += text
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=self._line)
        else:
            self.print(text, end="")

    def memory(self) -> None:
        """Print the bytes per parameter at rest, measured and predicted."""
        n, units = self.ranks, self.runs[0].forward.units
        parameters, elements = sum(unit.size for unit in units), sum(unit.length for unit in units)
        self.facts.update(parameters=parameters, padding=elements - parameters)
        self.print("\nMemory at rest, in bytes per parameter: after backward, before step, from the second step on")
        w = max(9, *(len(run.name) for run in self.runs))
        self.print(f"{'':{w}}   weights  gradients  optimizer │ measured  predicted │      held here   at 13 billion")
        whole = dict(zip(TERMS, (self.task.itemsize, self.task.itemsize, MOMENTS), strict=True))
        for run in self.runs:
            each = {term: held / elements for term, held in run.memory.items()}
            terms = run.theory and {t: b / (n if t in run.theory.sharded else 1) for t, b in whole.items()}
            theory = terms and sum(terms.values())
            total, held = sum(each.values()), sum(run.memory.values())
            run.facts["memory"] = {"bytes": run.memory, "per_parameter": each, "measured": total, "predicted": theory,
                                   "predicted_per_parameter": terms}  # fmt: skip
            predicted = "-" if theory is None else f"{theory:.2f}"
            self.print(f"{run.name:{w}}{each['weights']:10.2f}{each['gradients']:11.2f}{each['optimizer']:11.2f} │"
                       f"{total:9.2f}{predicted:>11} │{held:11,} bytes{13 * total:12.2f} GB")  # fmt: skip
        self.print(f"{parameters:,} parameters lie in vectors of {elements:,} elements, each vector a multiple of {n}.")
        if padding := elements - parameters:
            self.print(f"The other {padding} are padding, held and sent like parameters, and counted as such.")

    def traffic(self) -> None:
        """Print the bytes that a rank sends per step, measured and by formula, in units of Ψ(N-1)/N."""
        n, k = self.ranks, self.task.k
        psi = sum(unit.length for unit in self.runs[0].forward.units if unit.trainable) * self.task.itemsize
        share = psi // n * (n - 1)
        self.facts.update(psi=psi, share=share)
        ways = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"))
        ways |= dict.fromkeys(way for run in self.runs for way in run.traffic if way != "control")  # if there are more
        w, head = max(9, *(len(run.name) for run in self.runs)), "".join(f"  {way.replace('_', '-')}" for way in ways)
        self.print(f"\nSent by a rank per step, in Ψ(N-1)/N: Ψ = {psi:,} bytes, N = {n}, k = {k}")
        self.print(f"{'':{w}}{head} │ measured      formula │   in bytes     control")
        for run in self.runs:
            control = run.traffic.get("control", 0)
            formula = run.theory and run.theory.backward * k + run.theory.step
            sent = sum(run.traffic.values()) - control
            run.facts["traffic"] = {"bytes": sent, "measured": sent / share if share else None, "formula": formula,
                                    "by_operation": run.traffic}  # fmt: skip
            parts = [(run.traffic.get(way, 0), len(way) + 2) for way in ways]
            cells = [f"{f'{part / share:.2f}' if share else '-':>{width}}" for part, width in (*parts, (sent, 9))]
            known = f"{run.theory.formula} = {formula}" if run.theory else "-"
            self.print(f"{run.name:{w}}{''.join(cells[:-1])} │{cells[-1]}{known:>13} │{sent:11,}{control:6,} bytes")
        if n == 1:
            self.print("One rank has nobody to send to: try mpirun -n 8.")

    def same_bits(self, reference: mz.Engine, *engines: mz.Engine) -> None:
        """Compare every weight and every moment with the reference's, bit by bit, on every rank. Collective."""
        truth, names, found = tensors(reference), [], ""
        for engine in engines:
            mine, name = tensors(engine), next(run.name for run in self.runs if run.forward is engine)
            names.append(name)
            keys = [*truth, *(key for key in mine if key not in truth)]
            wrong = self.from_all([key for key in keys if differ(truth.get(key), mine.get(key))])
            first = next((key for key in keys if any(key in each for each in wrong)), "")
            if first and not found:
                where = ", ".join(str(rank) for rank, each in enumerate(wrong) if first in each)
                found = f"{name} differs, first in {first}, on rank {where}"
        same = f"{', '.join(names)}: all {len(truth)} weight and moment tensors on every rank"
        self.verdict("same bits as plain DP", not found, found or same)

    def verdict(self, claim: str, holds: bool, why: str) -> None:
        """Print whether a claim holds, on which all ranks agree; if it does not, `end` fails."""
        self.facts["verdicts"][claim] = {"holds": holds, "why": why}
        self.print(f"\n{claim}: {'yes' if holds else 'no'} ({why})")

    def plot(self, file: str) -> None:
        """Draw both pictures of the runs that are in the table of memory. For rank 0, which has recorded them."""
        shown = [run for run in self.runs if run.recorded and "memory" in run.facts]
        if not shown:
            self.print("\n--plot: no engine's step was recorded and shown in the table of memory: nothing is drawn")
            return
        steps = [step for run in shown for step in run.recorded]
        memory = [(run.name, run.facts["memory"]) for run in shown]
        rests = [pictures.Rest(name, m["per_parameter"], m["predicted_per_parameter"]) for name, m in memory]
        self.facts["pictures"] = pictures.draw(file, self.task.title(self.ranks), steps, rests)
        self.drawn(steps)

    def drawn(self, steps: list[pictures.Step]) -> None:
        """Say in numbers what the highest moments in the picture are, and where it is."""
        self.print(
            f"\nThe most that rank 0 held, or asked for, at once in the step that is drawn, in bytes\n{'':9}", end=""
        )
        self.print("".join(f"{term:>12}" for term in pictures.STYLES) + " │        all")
        for step in steps:
            phase, terms = step.largest
            cells = "".join(f"{terms[term]:12,}" for term in pictures.STYLES)
            self.print(f"{step.name:9}{cells} │{sum(terms.values()):11,} in {phase}")
        self.print(f"Pictures: {', '.join(self.facts['pictures'])}")

    def end(self, code: int = 0) -> None:
        """Draw, and print the JSON object, if that is wanted. Exit with code 1, on all ranks, if a verdict was no."""
        if self.task.plot is not None and MPI.COMM_WORLD.rank == 0:
            self.plot(self.task.plot)
        if self.task.options.json and MPI.COMM_WORLD.rank == 0:
            print(json.dumps(self.facts), flush=True)
        if code or not all(verdict["holds"] for verdict in self.facts["verdicts"].values()):
            sys.exit(1)


def most(*counts: Any) -> dict[str, int]:
    """The largest number under each key."""
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: max(each.get(key, 0) for each in counts) for key in keys}


def tensors(engine: mz.Engine) -> dict[str, Any]:
    """Every weight and every moment, whole, by name. Collective."""
    states = engine.gather_optimizer_state().items()
    moments = {f"{name} ({key})": array for name, state in states for key, array in state.items()}
    return {**engine.gather_parameters(), **moments}


def differ(a: Any, b: Any) -> bool:
    """Do two arrays differ in a bit? 0.0 and -0.0 do, a NaN and its copy do not; an absent array differs from any."""
    return a is None or b is None or (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes())


def on_terminal() -> bool:
    """Does what we print reach a terminal? Under mpirun our stdout is its pipe (or pty): look at where its own goes."""
    pid, stdout = os.getppid(), ""
    try:
        while re.match("mpi|hydra|prte|orte|srun", (stat := Path(f"/proc/{pid}/stat").read_text()).split("(")[1]):
            stdout, pid = os.readlink(f"/proc/{pid}/fd/1"), int(stat.rsplit(")")[-1].split()[1])
    except OSError:  # not Linux
        pass
    return stdout.startswith(("/dev/pts/", "/dev/tty")) if stdout else sys.stdout.isatty()
