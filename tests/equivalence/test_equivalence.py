# SPDX-License-Identifier: Apache-2.0
"""Any layout trains like one device: see [Note: equal] in cases.py."""

import pytest
from equivalence.generate import WORLDS, cases
from launch.case_jobs import of_job, results

ALL = [of_job(f"pp{w}", c.name, w, c.name) for w in WORLDS for c in cases(w)]


def found(world: int) -> dict[str, list[str]]:
    return results(f"pp{world}", world, "equivalence/run_cases.py", "layouts")


@pytest.mark.parametrize(("world", "case"), ALL)
def test_trains_like_one_device(world, case):
    assert case in found(world), f"it did not run: {found(world)['launch']}"
    assert found(world)[case] == []


@pytest.mark.parametrize("world", [of_job(f"pp{world}", "", world) for world in WORLDS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
