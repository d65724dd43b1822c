# SPDX-License-Identifier: Apache-2.0
"""Any way of sharding trains like one device: see [Note: equal] in cases.py."""

import pytest
from equivalence.sharded_cases import cases, cases_on_machines
from launch.case_jobs import of_job, results
from soak import SOAK

COUNTS = {2: 300, 4: 300, 8: 150} if SOAK else {2: 8, 4: 6, 8: 2}
ALL = [of_job(f"sharded{w}", c.name, w, c.name) for w in COUNTS for c in cases(w, COUNTS[w])]
ON_MACHINES = (4, 40 if SOAK else 4, 2)  # ranks, cases, ranks on each machine


def found(world: int) -> dict[str, list[str]]:
    return results(f"sharded{world}", world, "equivalence/run_cases.py", "sharded", str(COUNTS[world]))


@pytest.mark.parametrize(("world", "case"), ALL)
def test_trains_like_one_device(world, case):
    assert case in found(world), f"it did not run: {found(world)['launch']}"
    assert found(world)[case] == []


def found_on_machines() -> dict[str, list[str]]:
    world, count, each = ON_MACHINES
    return results("machines", world, "equivalence/run_cases.py", "machines", str(count), str(each))


@pytest.mark.parametrize("case", [of_job("machines", c.name, c.name) for c in cases_on_machines(*ON_MACHINES[:2])])
def test_trains_like_one_device_on_machines_by_levels(case):
    assert case in found_on_machines(), f"it did not run: {found_on_machines()['launch']}"
    assert found_on_machines()[case] == []


@pytest.mark.parametrize("world", [of_job(f"sharded{world}", "", world) for world in COUNTS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
