# SPDX-License-Identifier: Apache-2.0
"""Recorded runs find what is wrong in a layout, by the right name in the first line, and nothing where all is well."""

from pathlib import Path

import pytest
from launch.launcher_harness import Launcher, require_success
from soak import SOAK, some
from verify import checked_faults, random_models, run_faults
from verify.faults import FAULTS

CHOSEN = some(FAULTS, 6, seed=4)
CHOSEN_IN_JOBS = some(FAULTS, 5, seed=8)
CASES = {layout: 60 for layout in random_models.LAYOUTS} if SOAK else {(2, 2): 5, (2, 1): 4}


def runner(launcher: Launcher):
    def run(ranks: int, words: list[str], variables: dict[str, str]) -> None:
        require_success(launcher.start_ranks(ranks, Path(words[0]), *words[1:], env=variables))

    return run


@pytest.mark.timeout(0)  # they wait for each rank themselves
def test_planted_faults_are_found_where_they_are(launcher, tmp_path):
    run_faults.launch(tmp_path / "kept", CHOSEN, runner(launcher))
    assert run_faults.wrong_with(tmp_path / "kept", CHOSEN) == []


@pytest.mark.timeout(0)
def test_planted_faults_are_named_by_jobs_that_check_their_first_steps(launcher, tmp_path):
    checked_faults.launch(tmp_path, CHOSEN_IN_JOBS, runner(launcher))
    assert checked_faults.wrong_with(tmp_path, CHOSEN_IN_JOBS) == []


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("world", "partitions"), list(CASES))
def test_random_models_in_random_layouts_are_equal(launcher, tmp_path, world, partitions):
    lines = random_models.launch(tmp_path / "kept", world, partitions, 0, CASES[world, partitions], runner(launcher))
    assert [line for line in lines if not random_models.is_well(line)] == []
