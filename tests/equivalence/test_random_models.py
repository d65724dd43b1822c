# SPDX-License-Identifier: Apache-2.0
"""Random models in random layouts train like one device: what is drawn stands in random_cases.py."""

import os

import pytest
from equivalence.launches import results
from equivalence.random_cases import LAYOUTS, cases

SOAK = bool(os.environ.get("LAMINA_SOAK"))
DEADLINE_S = 3600 if SOAK else 240
WORLDS = sorted({partitions * replicas for partitions, replicas in LAYOUTS})
ALL = [case for world in WORLDS for case in cases(world, SOAK)]


def found(world: int) -> dict[str, list[str]]:
    return results("run_random_models.py", world, DEADLINE_S)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_trains_like_one_device(case):
    assert case.name in found(case.world), f"it did not run: {found(case.world)['launch']}"
    wrong = found(case.world)[case.name]
    again = f"python tests/equivalence/run_random_models.py {case.number}"
    assert not wrong, "\n".join([f"{len(wrong)} differences; to see them again: {again}", *wrong[:20]])


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("world", WORLDS)
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
