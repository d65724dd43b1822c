# SPDX-License-Identifier: Apache-2.0
"""A model that is sharded over all ranks, which may be on several machines, trains like one device; before that the
ranks gather by lamina.dist, and by a group of Gloo's of the script."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch.distributed
from equivalence.sharded_cases import ShardedCase, check

from lamina import dist

dist.initialize_dist("cpu", timeout=60)
ranks = list(range(int(os.environ["WORLD_SIZE"])))
assert dist.all_gather_object(dist.get_global_rank()) == ranks
torch.distributed.barrier(torch.distributed.new_group(ranks, backend="gloo"))
torch.distributed.destroy_process_group()
degree = int(os.environ["WORLD_SIZE"])
case = ShardedCase("Chain", degree, 1, "interleaved", 1, 1, 0, 37, 10**9, "adamw", "auto")
wrong = check(case)
assert not wrong, wrong
