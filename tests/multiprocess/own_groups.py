# SPDX-License-Identifier: Apache-2.0
"""own_groups.py WHEN: trains two replicas and ends without shutdown. WHEN says when the script itself initialises
torch.distributed: before lamina, after, or never."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import lamina

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
lamina.init(ddp=True)
if sys.argv[1] == "after":
    dist.init_process_group("gloo")
model = lamina.distribute(nn.Linear(4, 1))
model(torch.full((2, 4), float(lamina.rank()))).sum().backward()
assert torch.equal(model.module.weight.grad, torch.ones(1, 4)), model.module.weight.grad
objects = [None, None]
dist.all_gather_object(objects, lamina.rank(), group=lamina.get_dp_process_group())
assert objects == [0, 1]
dist.barrier()
