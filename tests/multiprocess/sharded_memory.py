# SPDX-License-Identifier: Apache-2.0
"""Says how much memory, as the system counts it, a model sharded over all ranks takes while it trains.

sharded_memory.py WIDTH LAYERS BACKEND OPTIMIZER writes MiB to DIR/RANK: the largest use after a step, less
that of a job that trained a tiny model.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import lamina


def used():
    """This process's part of what the system gave, in MiB: pages that several share count once. Without those of
    files, whose part is larger or smaller as other processes come and go."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def most_used(width, layers):
    lamina.init(
        ddp=True,
        sharded_data_parallel_degree=int(os.environ["WORLD_SIZE"]),
        sdp_param_persistence_threshold=0,
        ddp_dist_backend=sys.argv[3],
    )
    model = lamina.distribute(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))
    optimizer = lamina.DistributedOptimizer(getattr(lamina.optim, sys.argv[4])(model.parameters(), lr=1e-3))
    most = 0.0
    for _ in range(3):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lamina.barrier(lamina.WORLD)
        most = max(most, used())
    lamina.barrier(lamina.WORLD)
    return most


torch.set_num_threads(1)
tiny = most_used(64, 8)
lamina.shutdown()
Path(os.environ["DIR"], os.environ["RANK"]).write_text(str(most_used(int(sys.argv[1]), int(sys.argv[2])) - tiny))
