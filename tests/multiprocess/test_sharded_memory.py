# SPDX-License-Identifier: Apache-2.0
"""The memory that docs/sharding.md promises, as the system counts it."""

from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD_COMPILER

PROGRAM = Path(__file__).with_name("sharded_memory.py")
UNDER_WAY = 64  # MiB


STATES = {"AdamW": 2, "SGD": 0}  # of each parameter


@pytest.mark.parametrize(
    ("width", "layers", "backend", "optimizer"),
    [(2048, 7, "auto", "AdamW"), (1024, 28, "auto", "AdamW"), (2048, 12, "auto", "SGD"), (2048, 7, "nccl", "AdamW")],
)
def test_a_rank_takes_no_more_than_10_per_cent_above_the_prediction(width, layers, backend, optimizer, launcher):
    run = launcher.run("run", *PRELOAD_COMPILER, "-n", 2, PROGRAM, width, layers, backend, optimizer)
    assert run.returncode == 0, run.stderr
    parameters = 4 * width * width * layers / 2**20
    # Halves of values, of gradients, and of the states of the optimizer.
    predicted = (2 + STATES[optimizer]) * parameters / 2 + UNDER_WAY
    for rank in range(2):
        taken = float((launcher.folder / str(rank)).read_text())
        assert taken < 1.1 * predicted, f"{taken:.0f} MiB where {predicted:.0f} are predicted"
