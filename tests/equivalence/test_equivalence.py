# SPDX-License-Identifier: Apache-2.0
"""Any layout trains like one device: see [Note: equal] in cases.py."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equivalence.generate import WORLDS, cases

HERE = Path(__file__).parent
ALL = [(world, case.name) for world in WORLDS for case in cases(world)]


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    """What was wrong with each case, from one launch for all of them."""
    command = Path(sys.executable).with_name("lamina")
    limit = 3600 if os.environ.get("LAMINA_SOAK") else 240
    run = subprocess.run(
        [command, "run", "-n", str(world), HERE / "run_cases.py"], capture_output=True, text=True, timeout=limit
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    found = {line["case"]: line["wrong"] for line in lines}
    if run.returncode != 0:
        found["launch"] = [f"exit code {run.returncode}", run.stderr[-4000:]]
    return found


@pytest.mark.parametrize(("world", "case"), ALL, ids=[f"pp{w}-{c}" for w, c in ALL])
def test_trains_like_one_device(world, case):
    found = results(world)
    assert case in found, f"it did not run: {found.get('launch')}"
    assert found[case] == []


@pytest.mark.parametrize("world", WORLDS)
def test_launch_ends_well(world):
    assert "launch" not in results(world), "\n".join(results(world).get("launch", []))
