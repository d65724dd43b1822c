# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while rank 0 owns a module and the others train it."""

import json
from pathlib import Path

import pytest

VICTIM = Path(__file__).with_name("remote_victim.py")
STEPS, BEFORE = 30, 5  # of each trainer; of the one that dies


def read(launcher, name):
    return json.loads((launcher.folder / name).read_text())


@pytest.mark.parametrize("place", ["forward", "context"])
def test_a_dead_trainer_holds_nobody_up_and_its_context_goes(place, launcher):
    ranks = launcher.start_ranks(3, VICTIM, 2, place)
    outputs = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, -9], outputs
    assert read(launcher, "done.1")["text"] == str(STEPS)
    assert read(launcher, "served.0")["text"] == f"{STEPS + BEFORE} updates, 0 contexts"


def test_a_dead_owner_is_an_error_that_names_it_within_2_s(launcher):
    ranks = launcher.start_ranks(3, VICTIM, 0, "forward")
    outputs = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-9, 1, 1], outputs
    death = read(launcher, "death.0")["at"]
    for trainer in (1, 2):
        error = read(launcher, f"error.{trainer}")
        assert "rank 0 is lost" in error["text"]
        assert "[remote-owner-lost]" in error["text"]
        assert error["text"].startswith("PeerError")
        assert error["at"] - death < 2.0
