# SPDX-License-Identifier: Apache-2.0
"""Ranks of any layout are killed at random instants, one after the other: the others go on with the losses and states
of one process that nobody killed."""

import random

import pytest
from fault.test_outliving_parts import LAYOUTS, ends, require_undisturbed
from soak import SOAK

COPIES = {
    "copies 4": {"microbatches": 3},
    "copies 3": {"microbatches": 4},
    "pp 3": {"partitions": 3, "microbatches": 12},
}
EVERY = LAYOUTS | COPIES
STEPS = range(1, 7)  # in which ranks are killed: what one of them kept is kept anew two steps later


def drawn(number):
    """A layout, an optimizer, the most milliseconds after a step began, and the victims with their steps. A majority is
    left each time: of two the first one."""
    draw = random.Random(number)
    layout = draw.choice(sorted(EVERY))
    left = list(range(3 if layout.endswith("3") else 4))
    deaths, step = [], draw.choice(STEPS[:3])
    for _ in range(draw.randint(1, len(left) - 1)):
        victim = draw.choice(left if len(left) > 2 else left[1:])
        left.remove(victim)
        deaths.append(f"{victim}:{step}")
        step += draw.choice((2, 3))
        if step not in STEPS:
            break
    return layout, draw.choice(("adamw", "momentum")), draw.choice((5, 30, 100)), deaths


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", range(200 if SOAK else 4))
def test_the_others_go_on_whenever_one_is_killed(number, launcher, monkeypatch):
    layout, optimizer, within_ms, deaths = drawn(number)
    ranks = 3 if layout.endswith("3") else 4
    found = ends(launcher, ranks, EVERY[layout], str(within_ms), *deaths, OPTIMIZER=optimizer)
    require_undisturbed(found, monkeypatch, optimizer)
