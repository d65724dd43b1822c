# SPDX-License-Identifier: Apache-2.0
"""Ranks of a sharding group without memory in common that call modules of one size in different orders."""

import torch
from torch import nn

import lamina


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if lamina.rank() == 1 else self.second(x)


lamina.init(
    ddp=True,
    sharded_data_parallel_degree=2,
    sdp_param_persistence_threshold=0,
    ddp_dist_backend="nccl",
    timeout_s=30,
)
model = lamina.DistributedModel(Either())
model(torch.ones(2, 4)).sum().backward()
