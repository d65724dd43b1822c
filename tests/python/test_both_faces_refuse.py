# SPDX-License-Identifier: Apache-2.0
"""Refusals that both faces have: each case is refused in both with one text and one code."""

import os
import subprocess
from pathlib import Path

from archive import checkpoints
from launch.launcher_harness import built, command


def refusals(folder, *program):
    ran = subprocess.run(
        [command(), "run", "-n", "2", *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"REFUSALS_FOLDER": str(folder)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (line.partition("] ")[2] if line.startswith("[") else line for line in ran.stdout.splitlines())
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


def test_both_faces_refuse_the_same_with_the_same_words(tmp_path):
    checkpoints.save(tmp_path / "newer", "a", checkpoints.model(), about={"version": 99, "lamina": "9.9"})
    program = built("bin/frontend_refusals")
    ours, theirs = refusals(tmp_path, Path(__file__).with_name("refusals.py")), refusals(tmp_path, "-c", program)
    assert "nothing" not in ours.values()
    assert ours == theirs
