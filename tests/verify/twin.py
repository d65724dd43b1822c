# SPDX-License-Identifier: Apache-2.0
"""The twin of tests/frontend/verified.cc: the same model and steps, from the same random numbers.

lamina verify -n 2 tests/verify/twin.py (pipeline | shards | loop)
"""

import sys

import torch
from torch import nn

import lamina

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(*[Block() for _ in range(4)]), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.layers(x))


KEYS = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
kind = sys.argv[1]
lamina.init({"partitions": 2, "microbatches": 2} if kind == "pipeline" else KEYS)
torch.manual_seed(0)
model = lamina.DistributedModel(Net())
adam = lamina.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
torch.manual_seed(1 + lamina.dp_rank())


@lamina.step
def train(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


for _ in range(10):
    adam.zero_grad()
    x = torch.randn(8, WIDTH)
    model(x).square().mean().backward() if kind == "loop" else train(x)
    adam.step()
