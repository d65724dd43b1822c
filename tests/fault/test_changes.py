# SPDX-License-Identifier: Apache-2.0
"""A rank that dies while the layout of its job changes: everyone ends in time, with an error that names it. And many
changes, which leave nothing."""

import re
from pathlib import Path

import pytest
from fault.test_rank_killed import survivors
from soak import SOAK, some

CHANGES = Path(__file__).with_name("changes.py")
PLACES = ("listing", "between", "meeting", "ending", "cutting", "loading")
CHOSEN = some([(victim, place) for place in PLACES for victim in range(3)], 6, seed=7)


@pytest.mark.parametrize(("victim", "place"), CHOSEN)
def test_every_survivor_ends_within_5_s_and_names_the_dead_rank(victim, place, launcher):
    for _, error, _ in survivors(launcher, launcher.start_ranks(3, CHANGES, victim, place), victim):
        assert f"rank {victim} is lost" in error


@pytest.mark.timeout(1000)  # a soak makes a thousand
def test_many_changes_leave_nothing(launcher):
    changes = 500 if SOAK else 3  # there and back
    run = launcher.run(
        "run", "-n", 2, Path(__file__).with_name("many_changes.py"), 30 if SOAK else 2, changes, deadline_s=900
    )
    assert run.returncode == 0, run.stderr
    ranks = re.findall(r"grown: (-?\d+) \((\d+), (\d+)\) \((\d+), (\d+)\)", run.stdout)
    assert len(ranks) == 2, run.stdout
    for kib, files, keys, files_after, keys_after in (map(int, rank) for rank in ranks):
        assert files_after <= files + 1  # one may be open for a moment
        assert keys_after == keys
        assert kib < 2048 or not SOAK
