# SPDX-License-Identifier: Apache-2.0
"""Ranks of a sharding group without memory in common that call modules of one size in different orders.

other_order.py [PARTITIONS]
"""

import sys

import torch
from torch import nn

import lamina


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if lamina.dp_rank() == 1 else self.second(x)


PARTITIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
lamina.init(
    partitions=PARTITIONS,
    ddp=True,
    sharded_data_parallel_degree=2,
    sdp_param_persistence_threshold=0,
    ddp_dist_backend="nccl",
    timeout_s=30,
)
module = nn.Sequential(nn.Linear(4, 4), Either())
lamina.set_partition(module[1], PARTITIONS - 1)
model = lamina.DistributedModel(module)


@lamina.step
def train(x):
    model.backward(model(x).sum())


train(torch.ones(2, 4))
