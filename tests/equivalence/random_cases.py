# SPDX-License-Identifier: Apache-2.0
"""Draws a case from a number: a model, a layout and a way to train, as plain data that can be printed.

A *trait* is one thing that a pipeline can get wrong. Each operation of random_operations is one; the others are named
here. A case's name tells the traits that are really in it. To run one case, by its number:

    python tests/equivalence/run_random_models.py NUMBER

prints it and what is wrong with it on each rank.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from equivalence.random_operations import OPERATIONS
from equivalence.random_parts import SIMPLE, WRITABLE
from soak import some

EVERY, SAMPLE, SEED = 5000, 24, 34  # a seed with which all traits are in the sample, of models that are cut and not

# Traits that lamina does not promise yet; such cases are drawn without these traits.
NOT_YET = {
    "aliased_outputs",  # outputs of a remote module that share memory, of which the caller writes one
}
REPLICAS = True  # whether cases with more than one copy of the model are drawn

PART_TRAITS = ("embedding", "batch_norm", "ordered_batch_norm", "dropout", "mode")  # kinds that SIMPLE lacks
MODEL_TRAITS = ("shared_weight", "frozen", "idle", "module_hook")
LOSSES = ("two_losses", "given_gradient", "two_calls", "two_calls_reversed", "backward_between")
EVALUATIONS = ("evaluated", "inference")
INPUTS = ("lengths", "input_gradient", "writes_input")
TRAINING_TRAITS = (*INPUTS, *LOSSES, *EVALUATIONS, "accumulated", "zeroed", "toggled", "retained", "clipped", "twice")
DTYPES = ("float32", "autocast")
TRAITS = (*OPERATIONS, "reads_weight_anywhere", *PART_TRAITS, *MODEL_TRAITS, *TRAINING_TRAITS, *DTYPES)
# With rounding to 8 bits a decision may go the other way.
DECISIONS = {"branch", "integers"}

LAYOUTS = [(1, 1), (2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1)]  # (partitions, replicas)
if REPLICAS:
    LAYOUTS += [(1, 2), (2, 2)]
WORLDS = sorted({math.prod(each) for each in LAYOUTS})
MAX_CALLS = 24  # of parts in one forward


@dataclass(frozen=True)
class Operation:
    name: str
    parts: tuple[int, ...]  # that it calls
    x: int  # earlier tensors of the program: 0 is its input
    y: int


@dataclass
class Part:
    kind: str
    program: list[Operation] = field(default_factory=list)  # of a composite
    frozen: bool = False
    hooked: bool = False
    shares_weight_with: int | None = None  # both "linear"
    calls: int = 1  # of parts in one forward of it


@dataclass(frozen=True)
class RandomCase:
    number: int
    partitions: int
    replicas: int
    microbatches: int
    active_microbatches: int
    schedule: str
    rows: int  # of a microbatch, at least
    placed_by_hand: bool
    traits: frozenset[str]
    parts: list[Part]  # the last is the root

    @property
    def world(self) -> int:
        return self.partitions * self.replicas

    @property
    def copies(self) -> int:
        """How many batches there are side by side."""
        return self.replicas

    @property
    def sizes(self) -> list[list[int]]:
        """Rows of the microbatches of each batch. Half of the cases have batches that do not divide; with dropout,
        where one rank has all of them as one, only of one copy."""
        draw = random.Random(f"sizes of {self.number}")
        uneven = draw.random() < 0.5 and (self.copies == 1 or "dropout" not in self.traits)
        more = [draw.randrange(self.microbatches) if uneven else 0 for _ in range(self.copies)]
        return [[self.rows + (at < extra) for at in range(self.microbatches)] for extra in more]

    @property
    def name(self) -> str:
        layout = f"pp{self.partitions}-dp{self.replicas}-m{self.microbatches}-{self.schedule}"
        return f"{self.number}-{layout}-{'hand' if self.placed_by_hand else 'auto'}-{'+'.join(sorted(self.traits))}"

    def describe(self) -> str:
        lines = [self.name, f"active_microbatches={self.active_microbatches}, rows of microbatches: {self.sizes}"]
        for number, part in enumerate(self.parts):
            about = (
                f"  part {number}: {part.kind}"
                + (" (frozen)" if part.frozen else "")
                + (" (with a hook)" if part.hooked else "")
            )
            if part.shares_weight_with is not None:
                about += f" with the weight of {part.shares_weight_with}"
            lines.append(about)
            for at, op in enumerate(part.program, 1):
                lines.append(f"    tensor {at} = {op.name}(parts {list(op.parts)}, tensors {op.x} and {op.y})")
        return "\n".join(lines)


class _Drawing:
    """The parts of one model while they are drawn."""

    def __init__(self, draw: random.Random, wanted: set[str], kinds: Sequence[str]):
        self.draw, self.kinds = draw, kinds
        extra = [kind for kind in PART_TRAITS if kind in wanted] + ["linear"] * (2 * ("shared_weight" in wanted))
        self.parts = [Part(kind) for kind in extra + draw.choices(kinds, k=draw.randint(1, 3))]
        self.simple = [*range(len(self.parts))]
        self.uncalled = set(self.simple)

    def child(self, kind: str, budget: int) -> int:
        """A part of that kind: one that is there already, from any parent, or a new one."""
        if kind not in ("simple", "writable"):
            known = [n for n, part in enumerate(self.parts) if part.kind == kind]
            return self.draw.choice(known) if known and self.draw.random() < 0.3 else self.add(Part(kind))
        known = [n for n in self.simple if kind == "simple" or self.parts[n].kind in WRITABLE]
        known = [n for n in known if self.parts[n].calls <= budget]
        fresh = [n for n in known if n in self.uncalled]
        if fresh and self.draw.random() < 0.7:
            return self.draw.choice(fresh)
        if known and self.draw.random() < 0.6:
            return self.draw.choice(known)
        self.simple.append(
            new := self.add(Part(self.draw.choice(self.kinds if kind == "simple" else ("linear", "block"))))
        )
        return new

    def add(self, part: Part) -> int:
        self.parts.append(part)
        return len(self.parts) - 1

    def composite(self, names: list[str]) -> None:
        part = Part("composite", calls=1)
        for at, name in enumerate(names):
            _, kinds, times = OPERATIONS[name]
            budget = (MAX_CALLS - part.calls) // (len(names) - at) // times // len(kinds)
            children = tuple(self.child(kind, budget) for kind in kinds)
            self.uncalled -= set(children)
            part.calls += times * sum(self.parts[child].calls for child in children)
            x, y = self.draw.randint(max(0, at - 1), at), self.draw.randint(0, at)
            part.program.append(Operation(name, children, x, y))
        number = self.add(part)
        self.simple.append(number)
        self.uncalled.add(number)

    def root(self, names: list[str]) -> None:
        """Calls all that nobody has called yet."""
        self.composite([*names, "call"])
        root = self.parts[-1]
        for number in sorted(self.uncalled - {len(self.parts) - 1}):
            at = len(root.program)
            root.program.append(Operation("skip", (number,), self.draw.randint(0, at), at))
            root.calls += self.parts[number].calls


def draw_case(number: int) -> RandomCase:
    """The case of that number: always the same."""
    draw = random.Random(number)
    partitions, replicas = draw.choice(LAYOUTS)
    microbatches = draw.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8))
    by_hand = draw.random() < 0.5
    wanted = compatible(draw, set(draw.sample(TRAITS, draw.randint(4, 20))), microbatches, replicas)
    parts = draw_parts(draw, wanted)
    return RandomCase(
        number=number,
        partitions=partitions,
        replicas=replicas,
        microbatches=microbatches,
        active_microbatches=draw.randint(1, partitions + 3),
        schedule=draw.choice(("simple", ("interleaved", "zero_bubble")[number % 2])),
        rows=draw.randint(1, 2),
        placed_by_hand=by_hand,
        traits=frozenset(wanted - {"reads_weight_anywhere"} | seen_in(parts)),
        parts=parts,
    )


def compatible(draw: random.Random, wanted: set[str], microbatches: int, replicas: int) -> set[str]:
    """The traits of these that go together."""
    wanted = wanted - NOT_YET
    if "reads_weight_anywhere" in wanted:
        wanted.add("reads_weight")  # of a child, wherever the planner puts it
    if "ordered_batch_norm" in wanted:  # statistics that depend on the order of the microbatches
        wanted.add("twice")
    if "twice" in wanted or microbatches == 1:
        wanted = {"ordered_batch_norm" if t == "batch_norm" and draw.random() < 0.5 else t for t in wanted}
    if wanted & set(EVALUATIONS):
        wanted.add("mode")
    if "checkpointed" in wanted:  # torch stops recomputing early, after how many calls depends on who saved what
        wanted -= {"batch_norm", "ordered_batch_norm"}
    if wanted & {"float32", "autocast"}:  # of the gradient of a bias before them rounding is all there is (case 2305)
        wanted -= {"batch_norm", "ordered_batch_norm"}
    if "autocast" in wanted:
        wanted -= DECISIONS | {"float32"}
    if "unreached_graph" in NOT_YET and "missing_gradients" in wanted:
        wanted -= {"hooked", "reentrant_checkpointed"}
    if "reentrant_checkpointed" in wanted:  # torch refuses autograd.grad through it, where a part writes its argument
        wanted.discard("derivative")
    if "input_gradient" in wanted:
        wanted.discard("writes_input")
    for group in (LOSSES, EVALUATIONS):
        chosen = sorted(wanted & set(group))
        wanted -= set(chosen[1:])
    if replicas > 1:  # each has its statistics, and gradients that are not averaged
        wanted -= {"batch_norm", "ordered_batch_norm", "input_gradient", "retained"}
    return wanted


def draw_parts(draw: random.Random, wanted: set[str], kinds: Sequence[str] = SIMPLE) -> list[Part]:
    """Parts of these kinds, and of those that what is wanted needs; the last is the root."""
    operations = [name for name in OPERATIONS if name in wanted]
    draw.shuffle(operations)
    drawing = _Drawing(draw, wanted, kinds)
    if "idle" in wanted:
        drawing.add(Part("block"))
    for _ in range(draw.randint(0, 2)):
        count = draw.randint(0, min(3, len(operations)))
        drawing.composite([*operations[:count], *draw.choices(("call", "skip"), k=draw.randint(1, 2))])
        del operations[:count]
    drawing.root(operations)
    linear = [n for n, part in enumerate(drawing.parts) if part.kind == "linear"]
    if "shared_weight" in wanted:
        one, other = sorted(draw.sample(linear, 2))
        drawing.parts[other].shares_weight_with = one
    if "module_hook" in wanted:
        drawing.parts[draw.choice(drawing.simple[:-1])].hooked = True
    if "frozen" in wanted:
        drawing.parts[draw.randrange(len(drawing.parts) - 1)].frozen = True
    return drawing.parts


def seen_in(parts: list[Part]) -> set[str]:
    """Traits that came about without being wanted."""
    parents = [child for part in parts for child in {n for op in part.program for n in op.parts}]
    draws = {"dropout"} if any(part.kind == "drop" for part in parts) else set()
    return draws | ({"several_parents"} if len(parents) > len(set(parents)) else set())


def cases(world: int) -> list[RandomCase]:
    """The cases of that world size: all in a soak, else those of the sample."""
    numbers = some(range(EVERY), SAMPLE, seed=SEED)
    return [case for case in map(draw_case, numbers) if case.world == world]
