# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment of a step: all ranks end with its exit code, and one traceback at most is shown."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, eventually
from soak import SOAK, some

PROGRAM = Path(__file__).with_name("interrupted.py")
STEP_S = 0.3  # about what a step takes
LAYOUTS = [("simple", 2, 2), ("interleaved", 2, 2), ("interleaved", 3, 3), ("interleaved", 2, 1)]  # the last with ddp
RANKS = [(layout, rank) for layout in LAYOUTS for rank in (0, 1)]
MOMENTS = range(20 if SOAK else 1)


def process_id(launcher, rank):
    """Returns a rank's process; None until it has said who it is."""
    file = launcher.folder / f"ready-{rank}"
    return int(text) if file.exists() and (text := file.read_text()) else None


def started(launcher, schedule, ranks, partitions, moment):
    """A job, and the moment of a step that the seed has drawn."""
    job = launcher.start("run", *PRELOAD, "-n", ranks, PROGRAM, schedule, partitions)
    eventually(lambda: all(process_id(launcher, rank) for rank in range(ranks)))
    time.sleep(random.Random(f"{schedule} {ranks} {partitions} {moment}").uniform(0, STEP_S))
    return job


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layout", some(LAYOUTS, 1, seed=3), ids=str)
def test_of_the_launcher_ends_all_with_130_within_2_s(launcher, layout, moment):
    job = started(launcher, *layout, moment)
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 130, errors
    assert time.monotonic() - begin <= 2
    assert launcher.processes() == []
    assert "Traceback" not in errors, errors


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("layout", "rank"), some(RANKS[:6], 1, seed=3) + some(RANKS[6:], 1, seed=3), ids=str)
def test_of_one_rank_ends_all_with_130_within_2_s_and_one_traceback(launcher, layout, rank, moment):
    job = started(launcher, *layout, moment)
    begin = time.monotonic()
    os.kill(process_id(launcher, rank), signal.SIGINT)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 130, errors
    assert time.monotonic() - begin <= 2
    assert launcher.processes() == []
    assert errors.count("Traceback (most recent call last)") <= 1, errors
