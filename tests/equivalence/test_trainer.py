# SPDX-License-Identifier: Apache-2.0
"""The Trainer over any number of ranks trains like one device: what is drawn stands in trainer_cases.py."""

import pytest
from equivalence.trainer_cases import cases
from launch.case_jobs import of_job, results
from soak import SOAK

COUNTS = {1: 100, 2: 300, 3: 200, 4: 200} if SOAK else {1: 6, 2: 16, 3: 10, 4: 8}
ALL = [of_job(f"trainer{w}", case.name, w, case.name) for w, count in COUNTS.items() for case in cases(w, count)]


def found(world: int) -> dict[str, list[str]]:
    return results(f"trainer{world}", world, "equivalence/run_trainer.py", str(COUNTS[world]))


@pytest.mark.parametrize(("world", "case"), ALL)
def test_trains_like_one_device(world, case):
    assert case in found(world), f"it did not run: {found(world)['launch']}"
    assert found(world)[case] == []


@pytest.mark.parametrize("world", [of_job(f"trainer{world}", "", world) for world in COUNTS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
