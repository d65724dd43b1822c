# SPDX-License-Identifier: Apache-2.0
"""One list of batches through both faces: they have the same parts and the same results, or are refused alike."""

import subprocess
import sys
from pathlib import Path

from launch.launcher_harness import built


def parts(*program):
    ran = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dict(line.split("\t", 1) for line in ran.stdout.splitlines() if "\t" in line)


def test_both_faces_split_and_merge_alike():
    ours, theirs = parts(sys.executable, Path(__file__).with_name("splits.py")), parts(built("bin/frontend_splits"))
    assert ours == theirs
    assert sum(text.startswith("refused: ") for text in ours.values()) == 10
