# SPDX-License-Identifier: Apache-2.0
"""dist_program.py HOW: a rank of two that finds the other one, by lamina.dist, by lamina's own groups, or by the one
beside the other, and ends with the groups alive."""

import os
import sys

import lamina
from lamina import dist

places = [dist.get_global_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_local_world_size()]
if sys.argv[1] == "beside":
    lamina.init(ddp=True)
if sys.argv[1] in ("dist", "beside"):
    dist.initialize_dist("cpu", timeout=100)
if sys.argv[1] == "groups":
    lamina.init(ddp=True)
if sys.argv[1] in ("groups", "beside"):
    lamina.get_world_process_group()
assert places == [dist.get_global_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_local_world_size()]
assert dist.all_gather_object([*places, dist.get_node_rank()]) == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 0]]
assert os.environ["LOCAL_RANK"] == str(places[2]), "scripts find what torchrun would have set"
