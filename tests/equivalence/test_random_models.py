# SPDX-License-Identifier: Apache-2.0
"""Random models in random layouts train like one device: what is drawn stands in random_cases.py."""

import pytest
from equivalence.random_cases import LAYOUTS, cases
from launch.case_jobs import of_job, results

WORLDS = sorted({partitions * replicas for partitions, replicas in LAYOUTS})
ALL = [of_job(f"random{w}", case.name, case) for w in WORLDS for case in cases(w)]


def found(world: int) -> dict[str, list[str]]:
    return results(f"random{world}", world, "equivalence/run_random_models.py")


@pytest.mark.parametrize("case", ALL)
def test_trains_like_one_device(case):
    assert case.name in found(case.world), f"it did not run: {found(case.world)['launch']}"
    wrong = found(case.world)[case.name]
    again = f"python tests/equivalence/run_random_models.py {case.number}"
    assert not wrong, "\n".join([f"{len(wrong)} differences; to see them again, and where: {again}", *wrong[:20]])


@pytest.mark.parametrize("world", [of_job(f"random{world}", "", world) for world in WORLDS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
