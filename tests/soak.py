# SPDX-License-Identifier: Apache-2.0
"""Tests that `make test` leaves to `make soak`."""

import itertools
import os
import random

SOAK = bool(os.environ.get("LAMINA_SOAK"))


def some(every, count, seed=0):
    """Every case in a soak; else a few that the seed draws."""
    every = list(every)
    return every if SOAK else random.Random(seed).sample(every, count)


def paired(every, others, seed=0):
    """All pairs in a soak; else as few as have each of both in one, which the seed draws."""
    every, others = list(every), list(others)
    if SOAK:
        return list(itertools.product(every, others))
    random.Random(seed).shuffle(others)
    count = max(len(every), len(others))
    return [(every[number % len(every)], others[number % len(others)]) for number in range(count)]
