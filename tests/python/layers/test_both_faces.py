# SPDX-License-Identifier: Apache-2.0
"""One list of models of lamina.nn through both faces: they have the same bits, whole and cut over two ranks, or are
refused with the same words."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch.launcher_harness import built, command

HERE = Path(__file__).parent
CASES = HERE / "cases.txt"


def results(*program):
    ran = subprocess.run([*program, CASES], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (line.partition("] ")[2] if line.startswith("[") else line for line in ran.stdout.splitlines())
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_of_both_faces_have_the_same_bits(ranks):
    launched = [command(), "run", "-n", "2"] if ranks > 1 else []
    ours = results(*(launched or [sys.executable]), HERE / "both_faces.py")
    theirs = results(*launched, *(["-c"] if launched else []), built("bin/frontend_layers"))
    assert len(ours) == sum(not line.startswith("#") for line in CASES.read_text().splitlines())
    assert {name: text for name, text in ours.items() if theirs.get(name) != text} == {}
    assert all(name.startswith("refused") == text.startswith("refused: ") for name, text in ours.items())
