# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at a random instant of a phase: every survivor names it within 2 s, with the step and, if it is of
the same pipeline, what was asked of it."""

import random
import re
from pathlib import Path

import pytest
from fault.test_rank_killed import check_launcher, survivors
from launch.launcher_harness import PRELOAD_COMPILER
from soak import SOAK

MOMENTS = Path(__file__).with_name("moments.py")
FATAL_STEP = 3
PHASES = {
    "forward": [(2, 2), (3, 3), (4, 2)],
    "backward": [(2, 2), (3, 3), (4, 2)],
    "reduction": [(2, 1), (4, 2)],
    "between": [(2, 2), (3, 3), (4, 2), (2, 1)],
}


def drawn(phase, number):
    """A layout, a victim and a moment, the same for the same number."""
    draw = random.Random(f"{phase} {number}")
    ranks, partitions = draw.choice(PHASES[phase])
    return phase, ranks, partitions, draw.randrange(ranks), round(draw.random(), 3)


COUNT = 20 if SOAK else 1
CHOSEN = [
    (device, *drawn(phase, number + (device == "emulated")))
    for device in ("cpu", "emulated")
    for phase in PHASES
    for number in range(COUNT)
]


@pytest.mark.parametrize(("device", "phase", "ranks", "partitions", "victim", "fraction"), CHOSEN)
def test_every_survivor_names_the_dead_rank_its_step_and_microbatch_within_2_s(
    device, phase, ranks, partitions, victim, fraction, launcher
):
    started = launcher.start_ranks(
        ranks, MOMENTS, victim, phase, fraction, partitions, env={"LAMINA_DEVICE": device, "EMULATED_DELAY_US": "300"}
    )
    for rank, error, _ in survivors(launcher, started, victim):
        assert re.search(rf"rank {victim} (is|was) lost", error), error
        # Survivors may have begun the next step.
        assert re.search(rf"step ({FATAL_STEP}|{FATAL_STEP + 1})\b", error), error
        if rank // partitions == victim // partitions and partitions > 1:
            assert re.search(r"step \d, microbatch \d", error), error


@pytest.mark.parametrize("phase", ["backward", "reduction"])
def test_the_launcher_ends_within_5_s_with_the_signal_on_its_first_line(phase, launcher):
    ranks, partitions = (4, 2) if SOAK else PHASES[phase][0]
    victim, fraction = random.Random(phase).randrange(ranks), random.Random(phase).random()
    check_launcher(launcher, ranks, MOMENTS, victim, phase, fraction, partitions, preload=PRELOAD_COMPILER)
