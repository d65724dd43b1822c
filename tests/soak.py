# SPDX-License-Identifier: Apache-2.0
"""Tests that `make test` leaves to `make soak`."""

import os
import random

SOAK = bool(os.environ.get("LAMINA_SOAK"))


def some(every, count, seed=0):
    """All of them in a soak; else a few that the seed draws."""
    every = list(every)
    return every if SOAK else random.Random(seed).sample(every, count)
