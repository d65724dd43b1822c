# SPDX-License-Identifier: Apache-2.0
"""Any layout trains like one device: see [Note: equal] in cases.py."""

import functools
import json
import os
import pathlib
import tempfile

import pytest
from equivalence.generate import WORLDS, cases
from launch.launcher_harness import Launcher

HERE = pathlib.Path(__file__).parent
ALL = [(world, case.name) for world in WORLDS for case in cases(world)]
DEADLINE_S = 3600 if os.environ.get("LAMINA_SOAK") else 240


def wrong_on(folder: pathlib.Path, rank: int) -> dict[str, list[str]]:
    file = folder / f"wrong-{rank}"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    """What was wrong with each case, from one launch for all of them; under "launch", with the launch itself."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(pathlib.Path(folder))
        try:
            job = launcher.start("run", "-n", world, HERE / "run_cases.py")
            _, errors = job.communicate(timeout=DEADLINE_S)
            left = launcher.left_behind()
        finally:
            launcher.clean_up()
        per_rank = [wrong_on(pathlib.Path(folder), rank) for rank in range(world)]
    # A case counts when it ended on every rank.
    names = set.intersection(*map(set, per_rank))
    found = {n: [f"rank {r}: {line}" for r, wrong in enumerate(per_rank) for line in wrong[n]] for n in names}
    found["launch"] = left + ([f"exit code {job.returncode}", errors[-4000:]] if job.returncode else [])
    return found


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(("world", "case"), ALL, ids=[f"pp{w}-{c}" for w, c in ALL])
def test_trains_like_one_device(world, case):
    found = results(world)
    assert case in found, f"it did not run: {found['launch']}"
    assert found[case] == []


@pytest.mark.parametrize("world", WORLDS)
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert results(world)["launch"] == []
