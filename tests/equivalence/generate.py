# SPDX-License-Identifier: Apache-2.0
"""Which cases are checked. Every world size is launched once and runs them all."""

import itertools
import random

from equivalence.cases import Case
from equivalence.models import MODELS
from soak import SOAK, paired

SCHEDULES = ("simple", "interleaved", "zero_bubble")
MICROBATCHES = (1, 4)
WORLDS = (2, 3)


def cases(world: int) -> list[Case]:
    ways = itertools.product(SCHEDULES, MICROBATCHES)
    fixed = [Case(model, *way) for model, way in paired(MODELS, ways, seed=world)]
    single = [Case(model, "interleaved", 4, dtype="float32") for model in MODELS]
    draw = random.Random(world)
    by_hand = [
        Case(draw.choice(list(MODELS)), draw.choice(SCHEDULES), draw.choice((1, 2, 4, 8)), placement_seed=seed)
        for seed in range(400 if SOAK else 8)
    ]
    return fixed + single + by_hand
