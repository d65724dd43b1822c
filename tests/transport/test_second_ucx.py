# SPDX-License-Identifier: Apache-2.0
"""The lanes with a second UCX: the one of PyPI, which `make test-ucx` brings, beside the one that is found first."""

import os
import random
import subprocess

import pytest
from launch.launcher_harness import ROOT, built
from soak import SOAK

FOLDERS = sorted(ROOT.glob("build/ucx/libucx/lib"))


@pytest.mark.skipif(not FOLDERS, reason="`make test-ucx` brings a second UCX")
def test_ranks_talk_over_it():
    binary, environment = built("bin/ucx_test"), os.environ | {"LAMINA_UCX": str(FOLDERS[0])}
    listed = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suites = [line.split("#")[0].strip() for line in listed.splitlines() if line and not line.startswith(" ")][1:]
    chosen = suites if SOAK else random.Random(1).sample(suites, 2)
    patterns = ":".join(f"{suite}*" for suite in chosen)
    run = subprocess.run([binary, f"--gtest_filter={patterns}"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "[  PASSED  ]" in run.stdout, run.stdout + run.stderr
