# SPDX-License-Identifier: Apache-2.0
"""One list of plans through both faces: nets train over slices as they do whole, or are refused with one text."""

import os
import subprocess
from pathlib import Path

from launch.launcher_harness import built, command


def trained(*program):
    ran = subprocess.run(
        [command(), "run", "-n", "2", *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (line.partition("] ")[2] if line.startswith("[") else line for line in ran.stdout.splitlines())
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


def test_both_faces_train_and_refuse_plans_alike():
    ours, theirs = (
        trained(Path(__file__).with_name("slicing_plans.py")),
        trained("-c", built("bin/frontend_slicing_plans")),
    )
    assert ours == theirs
    wholes = {case: numbers.split("\t") for case, numbers in ours.items() if "\t" in numbers}
    assert len(wholes) == 14 and len(ours) == 25
    for case, (sliced, whole) in wholes.items():
        assert sliced == whole, case
