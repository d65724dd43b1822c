# SPDX-License-Identifier: Apache-2.0
"""A rank that is frozen: it is named after 10 s, and ends the job at timeout_s."""

import re
import time
from pathlib import Path

import pytest
from fault.test_rank_killed import BOUND_S, read
from launch.launcher_harness import PRELOAD, eventually
from soak import SOAK, some

FROZEN = Path(__file__).with_name("frozen.py")
NAMED_S = 10.0
EVERY = [(2, 2, rank, place) for rank in (0, 1) for place in ("forward", "backward", "between")]
EVERY += [(3, 3, 2, "forward"), (2, 2, 0, "body"), (2, 1, 1, "reduction"), (4, 2, 3, "reduction")]
# In a few seconds one may look at all; in a soak at more.
CHOSEN = some(EVERY, 2, seed=4)
LONG = [(2, 2, 1, "forward"), (2, 2, 0, "body"), (2, 1, 1, "reduction")]
LONG = LONG if SOAK else [LONG[0]]


def same_group(rank, other, partitions, place):
    """True where one of the two waits for the other."""
    return (
        rank % partitions == other % partitions if place == "reduction" else rank // partitions == other // partitions
    )


@pytest.mark.parametrize(("ranks", "partitions", "victim", "place"), CHOSEN)
def test_it_ends_every_rank_that_waits_for_it_at_timeout_s_with_an_error_that_names_it(
    ranks, partitions, victim, place, launcher
):
    timeout_s = 6.0  # which also bounds what comes before, on a busy machine
    started = launcher.start_ranks(ranks, FROZEN, victim, place, partitions, timeout_s)
    try:
        for rank in range(ranks):
            if rank == victim or not same_group(rank, victim, partitions, place):
                continue
            errors = started[rank].communicate(timeout=60)[1]
            assert started[rank].returncode == 1, errors
            error = read(launcher, f"error.{rank}")
            assert f"rank {victim}" in error["text"], error
            # It counts from the last thing that happened there, which may have been a moment before.
            assert timeout_s - 1 < error["at"] - read(launcher, f"death.{victim}")["at"] < timeout_s + BOUND_S
    finally:
        for rank in started:  # the others meet the loss of those
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(("ranks", "partitions", "victim", "place"), LONG)
def test_it_is_named_after_10_s(ranks, partitions, victim, place, launcher):
    started = launcher.start_ranks(ranks, FROZEN, victim, place, partitions, 60)
    try:
        other = launcher.folder / f"stderr-{1 - victim}"
        frozen = eventually(
            lambda: (launcher.folder / f"death.{victim}").exists() and read(launcher, f"death.{victim}")
        )
        warnings = lambda: [line for line in other.read_text().splitlines() if "warning: " in line]  # noqa: E731
        line = eventually(lambda: next((line for line in warnings() if "still waiting" in line), None))
        after = time.time() - frozen["at"]
        assert NAMED_S - 1 < after < NAMED_S + 2
        assert f"rank {victim}" in line.partition("warning: ")[2] and "10 s" in line, line
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


def test_the_launcher_ends_it_too_and_names_it(launcher):
    job = launcher.start("run", *PRELOAD, "-n", 2, FROZEN, 1, "forward", 2, 6)
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 1, errors
    assert "warning: rank 1 is stopped" in errors
    assert re.search(r"TimeoutError: .*(forward|backward) of .* on rank 1 \(step 3, microbatch \d\): no answer", errors)
    assert launcher.processes() == []
