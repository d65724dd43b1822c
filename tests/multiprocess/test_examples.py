# SPDX-License-Identifier: Apache-2.0
"""Examples that have no other test: they learn."""

import math
import re
from pathlib import Path

from launch.launcher_harness import PRELOAD_COMPILER

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_trainers_of_a_parameter_server_learn_a_text(launcher):
    run = launcher.run("run", *PRELOAD_COMPILER, "-n", 3, EXAMPLES / "parameter_server.py", "--steps", 80)
    assert run.returncode == 0, run.stderr
    untrained = math.log(256)  # of bytes; what rank 0 sees first may have been trained by the other
    last = float(re.search(r"loss on other text: (\d+\.\d+)", run.stdout)[1])
    assert last < 0.6 * untrained
