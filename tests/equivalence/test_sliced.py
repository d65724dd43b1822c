# SPDX-License-Identifier: Apache-2.0
"""Random models with sliced layers train like one device in any layout: what is drawn stands in sliced_cases.py."""

import pytest
from equivalence.run_random_models import SLICED
from equivalence.sliced_cases import LARGE, LAYOUTS, cases
from launch.case_jobs import of_job, results
from soak import SOAK

WORLDS = sorted({tp * partitions * replicas for tp, partitions, replicas in LAYOUTS + (LARGE if SOAK else [])})
ALL = [of_job(f"sliced{w}", case.name, case) for w in WORLDS for case in cases(w)]


def found(world: int) -> dict[str, list[str]]:
    return results(f"sliced{world}", world, "equivalence/run_random_models.py", SLICED)


@pytest.mark.parametrize("case", ALL)
def test_trains_like_one_device(case):
    assert case.name in found(case.world), f"it did not run: {found(case.world)['launch']}"
    wrong = found(case.world)[case.name]
    again = f"python tests/equivalence/run_random_models.py {SLICED} {case.number}"
    assert not wrong, "\n".join([f"{len(wrong)} differences; to see them again, and where: {again}", *wrong[:20]])


@pytest.mark.parametrize("world", [of_job(f"sliced{world}", "", world) for world in WORLDS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
