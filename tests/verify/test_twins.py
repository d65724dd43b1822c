# SPDX-License-Identifier: Apache-2.0
"""A program of C++ trains as its twin in Python does, in a layout and without one, as far as recordings tell."""

from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, built

TWIN = Path(__file__).with_name("twin.py")


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("pipeline", 2, "of 15 modules and 10 parameters"),
        ("shards", 2, "of 15 modules and 10 parameters"),
        ("slices", 2, ""),
        ("sliced_pipeline", 4, ""),
    ],
)
def test_recordings_of_both_faces_are_equal(launcher, kind, ranks, said):
    program = built("bin/frontend_verified")
    words = {"cpp": ["-c", program, "none"], "python": [*PRELOAD, TWIN]}
    for face, run in words.items():
        done = launcher.run("verify", "-n", ranks, "--steps", 2, "--keep", face, *run, kind)
        assert done.returncode == 0, done.stdout + done.stderr
    for first, second in (("cpp/layout", "python/plain"), ("python/layout", "cpp/plain")):
        done = launcher.run("verify", "--compare", first, second)
        missing = [line for line in done.stdout.splitlines() if line.startswith("  ")]
        assert done.returncode == (2 if missing else 0), done.stdout + done.stderr
        assert " 1e-04: 2 steps, " in done.stdout and said in done.stdout
        # C++ computes the loss of a language model's head without a call of it.
        assert all(kind.startswith("slice") and "no call of lm_head" in line for line in missing), missing
