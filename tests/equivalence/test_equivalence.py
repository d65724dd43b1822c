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


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    """What was wrong with each case, from one launch for all of them; under "launch", with the launch itself."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(pathlib.Path(folder))
        try:
            job = launcher.start("run", "-n", world, HERE / "run_cases.py")
            output, errors = job.communicate(timeout=DEADLINE_S)
            left = launcher.left_behind()
        finally:
            launcher.clean_up()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = {line["case"]: line["wrong"] for line in lines}
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
