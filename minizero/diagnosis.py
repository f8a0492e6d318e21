"""Which allocation failed, why, and what would cure it?

    illness                 how it shows                                            what cures it
    redundant state         the state that all ranks hold alike is too large        the first stage that fits
    weights as a whole      building fails, though each unit alone would fit        ZeRO-3, or a pipeline
    activations             no stage fits, all would without activations            smaller micro-batches
    one unit                it cannot be whole even alone on the device             smaller units, else a split matrix
    too many parameters     the shards themselves are too large                     more ranks

Where it failed does not say which: moments come in the first step, so from the second on the state that they
belong to may also tip over a forward. So all stages are predicted (plan.py) with what was held, and compared with
the limit. Only what fits by these numbers is recommended, with 5 % to spare.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from . import plan
from .comm import MPI
from .plan import STAGES, format_bytes
from .sizes import FLOAT, Sizes, UnitSize

SPARE = 1.05  # predictions may be 5 % too low
NAMES = dict(zip(("DataParallel", "Zero1", "Zero2", "Zero3"), STAGES, strict=True))
PLACES = {"forward": "forward", "backward": "backward", "step": "update"}
MOST = 4096  # ranks, parts or micro-batches: what needs more is not recommended


class OutOfMemory(MemoryError):  # noqa: N818
    """An allocation that a budget, or the GPU, had no room for.

    Attributes:
        phase: "building", "forward", "backward" or "step"; "outside" of all of them.
        unit, term: what the bytes were for; unit "" where it is none.
        asked, limit: bytes. held: bytes by term at that moment, without those asked for.
        stage, rank, ranks: of the engine at work; stage "" where there is none. steps: that it had made.
        sizes, recipe: its model and settings, for plan.py; None without engine.
        activations: bytes that a forward leaves, if one was seen to its end; else 0.
        reached: how many units had run, if it was in a forward. rows: examples in the last forward; 0: unknown.
    """

    def __init__(
        self,
        limit: int,
        asked: int,
        held: dict[str, int],
        term: str,
        phase: str,
        unit: Any = None,
        engine: Any = None,
        left: int = 0,
        reached: int = 0,
    ) -> None:
        self.limit, self.asked, self.held, self.term, self.phase = limit, asked, held, term, phase
        self.unit: str = unit.name if unit else ""
        self.stage = type(engine).__name__ if engine else ""
        self.steps: int = engine.steps if engine else 0
        self.rank: int = engine.comm.rank if engine else MPI.COMM_WORLD.rank
        self.ranks: int = engine.comm.size if engine else 1
        self.sizes = plan.sizes_of(engine) if engine and getattr(engine, "units", None) else None
        self.recipe = plan.recipe_of(engine) if self.sizes else None
        self.activations, self.reached, self.rows = left, reached, 0
        terms = ", ".join(f"{term} {size:,}" for term, size in held.items() if size)
        where = PLACES.get(phase, phase) + (
            f" of step {self.steps + 1}" if phase not in ("building", "outside") else ""
        )
        super().__init__(
            f"rank {self.rank} of {self.ranks}, {where}{f', unit {self.unit}' if unit else ''}: {asked:,} bytes more "
            f"for {term} do not fit in {limit:,}; held: {sum(held.values()):,} ({terms or 'nothing'})"
        )


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. `str` of it is the text for people.

    illness: see above. cure: in words; empty where nothing that is known here fits.
    stage: to train with. micro_batches: to cut a rank's batch into. split: tensor-parallel degree. ranks: to use.
    figures: predicted peak of each stage, in bytes, on the ranks there are. activations: bytes, as known or estimated.
    """

    error: OutOfMemory
    illness: str
    why: str
    cure: str = ""
    stage: str = ""
    micro_batches: int = 1
    split: int = 1
    ranks: int = 0
    figures: dict[str, int] = field(default_factory=dict)
    activations: int = 0

    def __str__(self) -> str:
        lines = [f"Illness: {self.illness}. {self.why}"]
        if self.figures:
            lines.append(f"Predicted peak of a rank, with 5 % to spare, against {format_bytes(self.error.limit)}:")
            for stage, nbytes in self.figures.items():
                verdict = "fits" if nbytes <= self.error.limit else "does not fit"
                lines.append(f"  {stage:8}{format_bytes(nbytes):>10}  {verdict}")
        lines.append(f"Cure: {self.cure or 'none of those known here fits.'}")
        return "\n".join(lines)


class _Patient:
    """The model that failed, to try cures on."""

    def __init__(self, error: OutOfMemory, sizes: Sizes) -> None:
        self.error, self.sizes = error, sizes
        self.recipe = error.recipe or plan.Recipe()  # `diagnose` has looked
        self.activations = error.activations or self._estimate()

    def _estimate(self) -> int:
        """What a whole forward leaves, from what it had left when it failed: units are taken as alike."""
        error, units = self.error, len(self.sizes.units)
        so_far = error.held["activations"] + (error.asked if error.term == "activations" else 0)
        return so_far * units // min(max(error.reached, 1), units) if error.phase == "forward" else so_far

    def peak(self, *args: Any, **options: Any) -> int:
        """What a device must have: the largest moment, with 5 % to spare, and what no term claims."""
        return int(SPARE * self.needs(*args, **options)) + self.error.held.get("other", 0)

    def needs(
        self, stage: str, activations: int, ranks: int = 0, split: int = 1, single: bool = False, k: int = 1
    ) -> int:
        """The largest moment of building, the first step and later ones, as predicted.

        `activations` are those of one of the step's `k` micro-batches; the second already finds gradients.
        """
        units = self.sizes.units
        if single:  # each parameter is a unit
            units = tuple(
                UnitSize(f"{u.name}.{i}", (p,), u.trainable) for u in units for i, p in enumerate(u.parameters)
            )
        units = tuple(replace(u, parameters=tuple(-(-p // split) for p in u.parameters)) for u in units)
        each = activations * FLOAT // self.recipe.wide // len(units)  # plan.py counts them as float32
        units = tuple(replace(u, activations=each) for u in units)
        # Of operations only the sum is known. relu and gelu need about as much more as this, for a moment.
        operations = (replace(o, forward=2 * o.kept, backward=9 * o.kept // 4) for o in Sizes(units).schedule())
        sizes, highest = Sizes(units, tuple(operations)), 0
        for first in (True, False):
            found = plan.peaks(sizes, self.recipe, stage, ranks or self.error.ranks, min(k, 2), first)
            highest = max(highest, *(sum(terms.values()) for terms in found.values()))
        return highest

    def fits(self, *args: Any, **options: Any) -> bool:
        return self.peak(*args, **options) <= self.error.limit

    def smallest(self, fits: Any) -> int:
        """The smallest power of two for which `fits` holds; 0 if none up to MOST does."""
        n = 2
        while n <= MOST and not fits(n):
            n *= 2
        return n if n <= MOST else 0


def diagnose(error: OutOfMemory) -> Diagnosis:
    """Say which illness made this allocation fail, and what would cure it, by numbers that are shown."""
    if error.sizes is None:
        return Diagnosis(
            error, "unknown", "No engine was at work when the allocation failed: see what the program holds."
        )
    if error.recipe is None:
        why = "A model of several dtypes, or an optimizer of your own, cannot be predicted: look at what is held."
        return Diagnosis(error, "unknown", why)
    patient, now = _Patient(error, error.sizes), NAMES.get(error.stage, "")
    figures = {stage: patient.peak(stage, patient.activations) for stage in STAGES}
    found: dict[str, Any] = {"figures": figures, "activations": patient.activations}
    held = max(error.held, key=lambda term: error.held[term])
    later = STAGES[STAGES.index(now) + 1 :] if now else STAGES  # this one has failed, whatever was predicted
    fitting = [stage for stage in later if figures[stage] <= error.limit]
    if fitting:
        stage, found["stage"] = fitting[0], fitting[0]
        shared = plan.at_rest(error.sizes, patient.recipe, now, error.ranks) if now else {}
        less = plan.at_rest(error.sizes, patient.recipe, stage, error.ranks)
        saved = sum(shared.values()) - sum(less.values()) if shared else 0
        cure = f"{stage}, the first stage that fits: at rest {format_bytes(saved)} less on each of {error.ranks} ranks."
        if error.phase not in PLACES:
            why = (f"All weights together do not fit on one rank, but each unit does ({error.sizes.largest.name}, the "
                   f"largest, has {format_bytes(patient.recipe.weight * error.sizes.largest.elements)}).")  # fmt: skip
            return Diagnosis(error, "weights as a whole", why, cure + " A pipeline would cut them, too.", **found)
        why = (f"Failed in the {PLACES[error.phase]} of step {error.steps + 1}, and {format_bytes(saved)} of what a "
               f"rank holds at rest is held by the {error.ranks} ranks alike.")  # fmt: skip
        return Diagnosis(error, "redundant state", why, cure, **found)

    if now and figures[now] <= error.limit:
        why = (f"{now} should have fitted by this prediction: something else is held, or it is wrong. The largest "
               f"term held is {held}.")  # fmt: skip
        return Diagnosis(error, "unknown", why, **found)
    bare = next((stage for stage in (now, *STAGES) if stage and patient.fits(stage, 0, k=2)), "")
    if bare:
        k = patient.smallest(lambda k: patient.fits(bare, patient.activations // k, k=k))
        k = 0 if error.rows and k > error.rows else k
        why = (f"The forward leaves {format_bytes(patient.activations)} of activations for the backward. They are the "
               f"same in every stage, and without them {bare} would fit.")  # fmt: skip
        cure = f"each batch in {k} parts, as micro-batches{f', with {bare}' * (bare != now)}."
        cure += " Recomputing activations in the backward, or shorter sequences, would help as well."
        return Diagnosis(error, "activations", why, cure if k else "", bare if k else "", k or 1, **found)

    unit = error.sizes.largest
    if not patient.fits("ZeRO-3", 0, ranks=MOST):
        why = (f"{unit.name} has {unit.elements:,} parameters, and being whole for its own forward and backward they "
               f"take {format_bytes(patient.needs('ZeRO-3', 0, ranks=MOST))} even if nothing else is held: every stage "
               "gathers it whole.")  # fmt: skip
        if patient.fits("ZeRO-3", patient.activations, single=True):
            cure = "smaller units: with ZeRO-3 and each matrix a unit of its own it fits (override Module.units)."
            return Diagnosis(error, "one unit", why, cure, "ZeRO-3", **{**found})
        split = patient.smallest(lambda n: patient.fits("ZeRO-3", patient.activations, split=n))
        cure = f"tensor parallelism: with its matrices split over {split} ranks, ZeRO-3 fits." if split else ""
        return Diagnosis(error, "one unit", why, cure, split=split or 1, **found)
    ranks = patient.smallest(lambda n: patient.fits("ZeRO-3", patient.activations, ranks=n))
    why = f"Even 1/{error.ranks} of everything, which is what ZeRO-3 holds, is too large."
    cure = f"more ranks: ZeRO-3 on {ranks} fits." if ranks else ""
    return Diagnosis(error, "too many parameters", why, cure, "ZeRO-3" if ranks else "", ranks=ranks, **found)
