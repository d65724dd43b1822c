# SPDX-License-Identifier: Apache-2.0
"""Tests in C++ of copies, with other delays of the emulated accelerators' streams."""

import os
import subprocess

import pytest
from launch.launcher_harness import built
from soak import some


@pytest.mark.parametrize("seed", some(range(100), 1))
@pytest.mark.parametrize("program", ["staging_test", "staging_ucx_test", "device_copies_test"])
def test_passes_whatever_the_delays(program, seed):
    delays = {"EMULATED_DELAY_US": "2000", "EMULATED_SEED": str(seed)}
    done = subprocess.run([built(f"bin/{program}")], env=os.environ | delays, capture_output=True, text=True)
    assert done.returncode == 0 and "[  PASSED  ]" in done.stdout, done.stdout + done.stderr
