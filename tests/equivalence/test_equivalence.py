# SPDX-License-Identifier: Apache-2.0
"""Any layout trains like one device: see [Note: equal] in cases.py."""

import os

import pytest
from equivalence.generate import WORLDS, cases
from equivalence.launches import results

ALL = [(world, case.name) for world in WORLDS for case in cases(world)]
DEADLINE_S = 3600 if os.environ.get("LAMINA_SOAK") else 240


def found(world: int) -> dict[str, list[str]]:
    return results("run_cases.py", world, DEADLINE_S)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(("world", "case"), ALL, ids=[f"pp{w}-{c}" for w, c in ALL])
def test_trains_like_one_device(world, case):
    assert case in found(world), f"it did not run: {found(world)['launch']}"
    assert found(world)[case] == []


@pytest.mark.parametrize("world", WORLDS)
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
