# SPDX-License-Identifier: Apache-2.0
"""Random models in random layouts train like one device: what is drawn stands in random_cases.py, and of models with
sliced layers in sliced_cases.py."""

import pytest
from equivalence import random_cases, sliced_cases
from equivalence.run_random_models import words_of
from launch.case_jobs import of_job, results

KINDS = {"random": random_cases, "sliced": sliced_cases}
WORLDS = [(kind, world) for kind, drawn in KINDS.items() for world in drawn.WORLDS]
ALL = [of_job(f"{kind}{world}", case.name, kind, case) for kind, world in WORLDS for case in KINDS[kind].cases(world)]


def found(kind: str, world: int) -> dict[str, list[str]]:
    return results(f"{kind}{world}", world, "equivalence/run_random_models.py", *words_of(KINDS[kind]))


@pytest.mark.parametrize(("kind", "case"), ALL)
def test_trains_like_one_device(kind, case):
    assert case.name in found(kind, case.world), f"it did not run: {found(kind, case.world)['launch']}"
    wrong = found(kind, case.world)[case.name]
    again = " ".join(["python tests/equivalence/run_random_models.py", *words_of(KINDS[kind]), str(case.number)])
    assert not wrong, "\n".join([f"{len(wrong)} differences; to see them again, and where: {again}", *wrong[:20]])


@pytest.mark.parametrize(("kind", "world"), [of_job(f"{kind}{world}", "", kind, world) for kind, world in WORLDS])
def test_the_launch_ends_well_and_leaves_nothing_behind(kind, world):
    assert found(kind, world)["launch"] == []
