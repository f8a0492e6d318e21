"""How many bytes will a rank hold?

At rest, between backward and step, per parameter, on N ranks. A weight and a gradient have b bytes (2 in bfloat16),
an optimizer keeps s (Adam 8, and 4 more with a float32 master copy):

             weights   gradients   optimizer      b = 2, s = 8: N = 8      N -> oo
    DP          b          b           s                   12                12
    ZeRO-1      b          b          s/N                   5                 4
    ZeRO-2      b         b/N         s/N                   3.25              2
    ZeRO-3     b/N        b/N         s/N                   1.5               0

In a step more comes and goes: activations, gathered units, gradients in passing, weights cast up for a product.
They are not all there at once, so `peaks` replays the step, allocation by allocation. Nothing is measured here: this
is arithmetic, and a test compares it with what the allocator says.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from .backend import ON_HOST
from .optim import block_size
from .parameter import DRAW_BLOCK
from .sizes import FLOAT, Operation
from .sizes import Sizes as Sizes
from .sizes import UnitSize as UnitSize
from .sizes import gpt as gpt
from .sizes import mlp as mlp
from .sizes import sizes_of as sizes_of

if TYPE_CHECKING:
    from .engine import Engine

TERMS = ("weights", "gradients", "optimizer", "activations", "temporary")
PHASES = ("building", "forward", "backward", "step")
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}
WIDTHS = {"float32": 4, "float64": 8, "bfloat16": 2}
PREFIXES = {p: 1000**i for i, p in enumerate(["", *"kMGT"])} | {f"{p}i": 1024**i for i, p in enumerate("KMGT", 1)}
Terms = dict[str, int]


def parse_bytes(text: str) -> int:
    """Bytes of "80GB" (10^9), "80 GiB" (2^30), "1.5 MB", "512 B" or "512". Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]{1,2})?)\s*([kmgt]?i?)(b?)\s*", text, re.IGNORECASE)
    example = "write a number and a unit, such as 80GB (10^9 bytes) or 80GiB (2^30)"
    if not found or found[1].count(".") > 1 or not re.search("[0-9]", found[1].lower().split("e")[0]):
        raise ValueError(f"{text!r} is no number of bytes: {example}")
    number, prefix, unit = found.groups()
    if unit == "b":
        raise ValueError(f"{text!r}: a small b stands for bits: {example}")
    factors = {key.lower(): factor for key, factor in PREFIXES.items()}
    if prefix.lower() not in factors or (prefix and not unit):
        raise ValueError(f"{text!r} has no clear unit: {example}")
    nbytes = Decimal(number) * factors[prefix.lower()]
    if nbytes > 10**18:
        raise ValueError(f"{text[:40]!r} is more than any device has: {example}")
    return int(nbytes)


def format_bytes(n: float) -> str:
    """ "156 GB", "42.25 GB", "512 B": four digits, in powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(n) < 999.95 or prefix == "T":
            break
        n /= 1000
    return f"{n:.4g} {prefix}B" if abs(n) < 9999.5 else f"{n:,.0f} {prefix}B"


@dataclass(frozen=True)
class Recipe:
    """What is kept per parameter: in which dtype, by which optimizer, with a float32 master copy or without."""

    dtype: str = "bfloat16"
    optimizer: str = "adam"  # "adam", "momentum" (SGD with it) or "sgd" (without)
    master: bool = False  # makes no difference unless the dtype has 16 bits

    def __post_init__(self) -> None:
        for what, given, known in (("dtype", self.dtype, WIDTHS), ("optimizer", self.optimizer, MOMENTS)):
            if given not in known:
                raise ValueError(f"{what} {given!r} is unknown: use one of {', '.join(known)}")

    @property
    def weight(self) -> int:
        """Bytes of a weight."""
        return WIDTHS[self.dtype]

    gradient = weight

    @property
    def wide(self) -> int:
        """Bytes of what a weight is computed with, and of a moment."""
        return max(self.weight, FLOAT)

    @property
    def state(self) -> int:
        """Bytes that the optimizer keeps for a parameter."""
        return self.wide * (MOMENTS[self.optimizer] + (self.master and self.weight < self.wide))


def recipe_of(engine: Engine) -> Recipe | None:
    """What an engine keeps per parameter; None where that is no `Recipe`: mixed dtypes, an optimizer of your own."""
    dtypes, moments = {str(unit.dtype) for unit in engine.units}, len(engine.optimizer.moments)
    names = [name for name, number in MOMENTS.items() if number == moments]
    return Recipe(dtypes.pop(), names[0], engine.optimizer.master) if len(dtypes) == 1 and names else None


def shares(stage: str, ranks: int) -> tuple[int, int, int]:
    """By how many ranks a stage divides weights, gradients and optimizer state."""
    if stage not in STAGES or ranks < 1:
        raise ValueError(f"no such plan: stage {stage!r} of {', '.join(STAGES)}, on {ranks} ranks")
    level = STAGES.index(stage)
    return (ranks if level > 2 else 1), (ranks if level > 1 else 1), (ranks if level > 0 else 1)


def at_rest(what: float | Sizes, recipe: Recipe, stage: str, ranks: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state on a rank, after backward and before the step.

    `what` is a number of parameters, of which a rank has exactly its share, or `Sizes`: then with padding.
    """
    everything = trained = what if not isinstance(what, Sizes) else 0
    if isinstance(what, Sizes):
        everything = sum(unit.length(ranks) for unit in what.units)
        trained = sum(unit.length(ranks) for unit in what.units if unit.trainable)
    w, g, o = shares(stage, ranks)
    terms = recipe.weight * everything / w, recipe.gradient * trained / g, recipe.state * trained / o
    return dict(zip(TERMS, terms, strict=False))


def padding(sizes: Sizes, ranks: int) -> int:
    """Elements that are added to the units so that they can be cut in `ranks` equal chunks."""
    return sum(unit.length(ranks) - unit.elements for unit in sizes.units)


def traffic(stage: str, micro_batches: int = 1) -> int:
    """Bytes that a rank sends per step, in units of Ψ(N-1)/N, where Ψ is the bytes of all weights."""
    k = micro_batches
    return {"DP": 2 * k, "ZeRO-1": 2 * k + 1, "ZeRO-2": k + 1, "ZeRO-3": 3 * k}[stage]


def peaks(
    sizes: Sizes, recipe: Recipe, stage: str, ranks: int, micro_batches: int = 1, first: bool = False
) -> dict[str, Terms]:
    """Bytes by term at the largest moment of each phase. `first`: of the first step, which has no moments yet."""
    replay, micro_batches = _Replay(sizes, recipe, stage, ranks), max(micro_batches, min(sizes.micro_batches, 2))
    replay.build()
    for _ in range(1 if first else 2):
        for phase in PHASES[1:]:
            replay.highest.pop(phase, None)
        for _ in range(micro_batches):
            replay.forward()
            replay.backward()
        replay.step()
    for phase in PHASES[1:3]:  # others wait for their backward, in a pipeline
        replay.highest[phase]["activations"] += (sizes.live - 1) * sizes.activations * recipe.wide // FLOAT
    return replay.highest


class _Replay:
    """What a rank holds now, by term, while the events of a step go by in the order in which they happen."""

    def __init__(self, sizes: Sizes, recipe: Recipe, stage: str, ranks: int) -> None:
        self.units, self.operations, self.loss = sizes.units, sizes.schedule(), sizes.loss
        if recipe.wide > FLOAT:
            self.operations, self.loss = [o.scaled(2) for o in self.operations], self.loss.scaled(2)
        self.recipe, self.ranks, self.level = recipe, ranks, STAGES.index(stage)
        self.shares = dict(zip(TERMS, shares(stage, ranks), strict=False))
        self.live: Terms = dict.fromkeys(TERMS, 0)
        self.highest: dict[str, Terms] = {}
        self.phase = "building"
        self.scratch: Counter[str] = Counter()  # arrays that stay and are used again, by purpose
        self.gathered: set[int] = set()
        self.local: set[int] = set()  # units whose own gradient is being put together
        self.summed: set[int] = set()  # units of whose gradients something is kept
        self.narrow = recipe.weight < recipe.wide

    def see(self, passing: int = 0, **more: int) -> None:
        """Look at this moment, in which so many temporary bytes more are alive (and of other terms)."""
        now = {term: held + more.get(term, 0) for term, held in self.live.items()}
        now["temporary"] += passing
        if sum(now.values()) > sum(self.highest.get(self.phase, {}).values()):
            self.highest[self.phase] = now

    def hold(self, term: str, nbytes: int) -> None:
        self.live[term] += nbytes
        self.see()

    def reserve(self, purpose: str, nbytes: int) -> None:
        """Scratch that stays. A larger array is made before the smaller one goes."""
        if nbytes > self.scratch[purpose]:
            self.see(nbytes)
            self.hold("temporary", nbytes - self.scratch[purpose])
            self.scratch[purpose] = nbytes

    def reserve_blocks(self, elements: int, *purposes: str) -> None:
        """Blocks of so long a vector, in which 16-bit numbers are computed as float32; wider ones need none."""
        for purpose in purposes if self.narrow else ():
            self.reserve(purpose, block_size(elements) * self.recipe.wide)

    def elements(self, i: int, term: str) -> int:
        """Elements of a unit's vector that stay here of a term."""
        return self.units[i].length(self.ranks) // self.shares[term]

    def vector(self, i: int, term: str = "") -> int:
        """Bytes of a unit's vector: the whole one, or what stays here of a term."""
        length = self.elements(i, term) if term else self.units[i].length(self.ranks)
        return length * (self.recipe.state if term == "optimizer" else self.recipe.weight)

    def trained(self) -> list[int]:
        return [i for i, unit in enumerate(self.units) if unit.trainable]

    def gather(self, i: int) -> None:
        if self.level == 3 and i not in self.gathered:
            self.gathered.add(i)
            self.hold("temporary", self.vector(i))

    def release(self, i: int) -> None:
        if i in self.gathered:
            self.gathered.remove(i)
            self.live["temporary"] -= self.vector(i)

    def build(self) -> None:
        """Unit by unit: draw it, let it go round the ring, keep what is to stay."""
        for i, unit in enumerate(self.units):
            self.hold("temporary", self.vector(i))
            self.see((unit.draw if ON_HOST else FLOAT) * min(max(unit.parameters), DRAW_BLOCK))
            self.reserve("ring", self.vector(i) // self.ranks)
            self.see(self.vector(i, "weights") if self.level == 3 else 0)  # the chunk is a copy
            self.live["temporary"] -= self.vector(i)
            self.live["weights"] += self.vector(i, "weights")

    def forward(self) -> None:
        """A unit is gathered while its module runs; a root's module is the whole model."""
        self.phase = "forward"
        roots = {i for i, unit in enumerate(self.units) if unit.root}
        for i in roots:
            self.gather(i)
        for operation in self.operations:
            wanted = roots | ({operation.unit} if operation.inside else set())
            for i in self.gathered - wanted:
                self.release(i)
            for i in wanted:
                self.gather(i)
            self.see(self.cast(operation), activations=operation.forward)
            self.live["activations"] += operation.kept
        for i in set(self.gathered):
            self.release(i)
        self.see(activations=self.loss.forward)
        self.live["activations"] += self.loss.kept

    def wide(self, operation: Operation) -> int:
        """Bytes of an operation's parameter in the dtype it is computed in: its cast, or its gradient."""
        if operation.parameter is None:
            return 0
        return self.units[operation.unit].parameters[operation.parameter] * self.recipe.wide

    def cast(self, operation: Operation) -> int:
        """Bytes of the copy that a product makes of a 16-bit parameter, for as long as it takes."""
        return self.wide(operation) if operation.product and self.narrow else 0

    def backward(self) -> None:
        """Last operation first. A unit is reduced as soon as its gradient is complete, but none before the last one."""
        self.phase = "backward"
        used = [(o.unit, o.parameter) for o in self.operations if o.parameter is not None]
        users, unfinished = Counter(used), Counter(unit for unit, _ in set(used))
        waiting: dict[tuple[int, int], int] = {}  # bytes of gradients that another use will be added to
        todo = self.trained()
        self.see(self.loss.backward)
        self.live["activations"] -= self.loss.freed
        for operation in reversed(self.operations):
            i, passing = operation.unit, operation.backward
            if operation.parameter is None:
                self.see(passing)
                self.live["activations"] -= operation.freed
                continue
            key, trained = (i, operation.parameter), self.units[i].trainable
            self.gather(i)
            self.see(passing + self.cast(operation))
            fresh = self.compute(operation, key in waiting) if trained else 0
            self.live["temporary"] -= waiting.pop(key, 0)
            self.live["activations"] -= operation.freed
            users[key] -= 1
            if users[key]:
                waiting[key] = fresh
                self.live["temporary"] += fresh
                continue
            if trained:
                self.start(i)
                self.see(passing + fresh)
            unfinished[i] -= 1
            if not unfinished[i]:
                self.release(i)
            while todo and not unfinished[todo[-1]]:
                self.reduce(todo.pop())

    def compute(self, operation: Operation, again: bool) -> int:
        """Bytes of a parameter's gradient: 0 where a product can write it, unrounded, into the local vector.

        `again`: what another use left is waiting; the sum of both is a third array.
        """
        direct = operation.product and not self.narrow and not again
        if direct:
            self.start(operation.unit)
        fresh = 0 if direct else self.wide(operation)
        self.see(operation.backward + fresh)
        if again:
            self.see(operation.backward + fresh + self.wide(operation))
        return fresh

    def start(self, i: int) -> None:
        """The vector that a unit's own gradient is put together in."""
        if i not in self.local:
            self.local.add(i)
            self.hold("temporary", self.vector(i))

    def reduce(self, i: int) -> None:
        """Add up over ranks. The first sum is kept as it is, a later one is added to it; a chunk is a copy."""
        kept = self.vector(i, "gradients")  # the ring's scratch is there since building
        if self.ranks > 1:
            self.reserve_blocks(self.units[i].length(self.ranks) // self.ranks, "a", "b")
        if i in self.summed:
            self.reserve_blocks(self.elements(i, "gradients"), "a", "b")
        self.see(kept if self.level > 1 else 0)
        self.local.remove(i)
        self.live["temporary"] -= self.vector(i)
        self.see(kept)
        if i not in self.summed:
            self.summed.add(i)
            self.live["gradients"] += kept

    def step(self) -> None:
        """The mean, then (in the first step) moments for all units, then the updates, which allocate nothing."""
        self.phase = "step"
        self.see()
        held, updated = (
            max((self.elements(i, term) for i in self.trained()), default=0) for term in ("gradients", "optimizer")
        )
        self.reserve_blocks(held, "a")
        self.reserve_blocks(updated, "weights", "gradient")
        self.reserve("update", block_size(updated) * self.recipe.wide)
        self.live["optimizer"] = sum(self.vector(i, "optimizer") for i in self.trained())
        self.see()
        self.live["gradients"] = 0
        self.summed.clear()
