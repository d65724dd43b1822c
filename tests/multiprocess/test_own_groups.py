# SPDX-License-Identifier: Apache-2.0
"""torch.distributed next to lamina, under each launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, require_success
from soak import some

PROGRAM = Path(__file__).with_name("own_groups.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WHEN = ["before", "after", "never"]


@pytest.mark.parametrize("when", WHEN)
def test_replicas_train_and_end_well_whoever_makes_the_groups(when, launcher):
    require_success(launcher.start_ranks(2, PROGRAM, when))


@pytest.mark.parametrize("when", some(WHEN, 1, seed=2))
def test_they_do_so_under_lamina_run(when, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, when)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("when", some(WHEN, 1))
def test_they_do_so_under_torchrun(when):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    words = [*TORCHRUN, PROGRAM, when]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
