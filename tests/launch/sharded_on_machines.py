# SPDX-License-Identifier: Apache-2.0
"""A model that is sharded over all ranks, which may be on several machines, trains like one device."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from equivalence.sharded_cases import ShardedCase, check

degree = int(os.environ["WORLD_SIZE"])
case = ShardedCase("Chain", degree, 1, "interleaved", 1, 1, 0, 37, 10**9, "adamw", "auto")
wrong = check(case)
assert not wrong, wrong
