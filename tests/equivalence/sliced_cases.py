# SPDX-License-Identifier: Apache-2.0
"""Draws a random case with sliced layers from a number: as random_cases.py, with parts of sliced_parts.py, and a layout
of slices, partitions and copies. To run one case, by its number:

    python tests/equivalence/run_random_models.py --sliced NUMBER
"""

import math
import random
from dataclasses import dataclass

from equivalence.random_cases import RandomCase, compatible, draw_parts, seen_in
from equivalence.random_parts import SIMPLE
from equivalence.sharded_cases import THRESHOLDS
from equivalence.sliced_parts import DRAWING, PLAIN
from soak import SOAK, some

EVERY, SAMPLE, SEED = 2000, 18, 2939  # a seed with which almost all kinds, traits and options are in the sample

OPERATIONS = (
    *("product", "repeated", "branch", "data_loop", "no_grad", "detached", "ignored", "views", "hooked"),
    *("checkpointed", "reentrant_checkpointed", "missing_gradients", "structured", "writes_received"),
)
OTHERS = (
    *("shared_weight", "frozen", "idle", "module_hook", "lengths", "two_losses", "given_gradient", "two_calls"),
    *("evaluated", "inference", "accumulated", "zeroed", "clipped", "clipped"),
)
DRAWS, CHECKPOINTS = "dropout", "checkpoints"  # of parts, and of modules anywhere
DEPENDS_ON_DATA = {"branch", "data_loop"}  # whether modules are called

# Degrees of slices, partitions and copies.
LAYOUTS = [(2, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)]
LARGE, EVERY_LARGE = [(4, 2, 1), (2, 2, 2), (4, 1, 2)], 100  # of eight ranks, in a soak
WORLDS = sorted({math.prod(each) for each in LAYOUTS + (LARGE if SOAK else [])})
OPTIMIZERS = ("sgd", "adamw", "lamb", "novograd", "adafactor")


@dataclass(frozen=True)
class SlicedCase(RandomCase):
    tp: int
    prescaled: bool
    optimize: str
    optimizer: str
    sharding: int  # ranks that share parameters; 1: none do
    moved: tuple[int, int] | None  # the slices and partitions into which a checkpoint goes; None: none is saved
    threshold: int  # of elements, up to which parameters are not shared

    @property
    def world(self) -> int:
        return self.tp * self.partitions * self.replicas

    @property
    def copies(self) -> int:
        return self.replicas * (1 if self.prescaled else self.tp)

    @property
    def name(self) -> str:
        layout = f"tp{self.tp}-pp{self.partitions}-rdp{self.replicas}-m{self.microbatches}"
        options = [
            f"sdp{self.sharding}t{self.threshold}" if self.sharding > 1 else "",
            self.schedule,
            self.optimize,
            self.optimizer,
            "one" if self.prescaled else "own",
        ]
        moved = "" if self.moved is None else f"to-tp{self.moved[0]}-pp{self.moved[1]}"
        placed = "hand" if self.placed_by_hand else "auto"
        return "-".join(
            filter(None, [str(self.number), layout, *options, placed, moved, "+".join(sorted(self.traits))])
        )


def draw_case(number: int) -> SlicedCase:
    """The case of that number: always the same."""
    draw = random.Random(number)
    tp, partitions, replicas = draw.choice(LARGE if number >= EVERY else LAYOUTS)
    microbatches = draw.choice((1, 2, 2, 3, 4))
    prescaled = draw.random() < 0.6
    wanted = compatible(draw, set(draw.sample(OPERATIONS + OTHERS, draw.randint(2, 10))), microbatches, replicas)
    draws, checkpoints = draw.random() < 0.4, draw.random() < 0.3
    sharding = draw.choice((1, replicas))
    wanted = _not_refused(wanted, tp, prescaled)
    if checkpoints:  # they keep what they are given, and over ranks give zeros where nothing comes back
        wanted -= {"writes_received", "missing_gradients"}
    parts = draw_parts(draw, wanted, [*PLAIN, *(DRAWING if draws else ()), *draw.sample(SIMPLE, 3)])
    draws = {DRAWS} if any(part.kind in DRAWING for part in parts) else set()
    return SlicedCase(
        number=number,
        partitions=partitions,
        replicas=replicas,
        microbatches=microbatches,
        active_microbatches=draw.randint(1, partitions + 2),
        schedule=draw.choice(("simple", ("interleaved", "zero_bubble")[number % 2])),
        rows=draw.randint(1, 2),
        placed_by_hand=partitions > 1 and (draw.random() < 0.5 or not prescaled),
        traits=frozenset(wanted | seen_in(parts) | draws | ({CHECKPOINTS} if checkpoints else set())),
        parts=parts,
        tp=tp,
        prescaled=prescaled,
        optimize=draw.choice(("speed", "memory")),
        optimizer=draw.choice(OPTIMIZERS),
        sharding=sharding if prescaled or tp == 1 else 1,
        moved=draw.choice(_others(tp, partitions, replicas)) if draw.random() < 0.25 else None,
        threshold=draw.choice(THRESHOLDS),
    )


def _not_refused(wanted: set[str], tp: int, prescaled: bool) -> set[str]:
    """Leaves out what is refused on purpose: see "Limits" in docs/tensor-parallelism.md. `draw_case` does so, too: with
    partitions and batches of each rank's own a region is placed by hand, as a whole. Slices are sharded where all ranks
    of a TP_GROUP have one batch."""
    if not prescaled and tp > 1:
        wanted = wanted - DEPENDS_ON_DATA  # all ranks are to call a region, or none
    return wanted


def _others(tp: int, partitions: int, replicas: int) -> list[tuple[int, int]]:
    """Other layouts of as many ranks."""
    world = tp * partitions * replicas
    degrees = [(t, p) for t in (1, 2, 4) for p in (1, 2) if world % (t * p) == 0]
    return [each for each in degrees if each != (tp, partitions)]


def cases(world: int) -> list[SlicedCase]:
    """The cases of that world size: all in a soak, else those of the sample."""
    numbers = [*some(range(EVERY), SAMPLE, seed=SEED), *(range(EVERY, EVERY + EVERY_LARGE) if SOAK else ())]
    return [case for case in map(draw_case, numbers) if case.world == world]
