# SPDX-License-Identifier: Apache-2.0
"""leaves.py RANK: that rank ends with exit code 3 while the other one waits for it in a step."""

import sys

import torch
from torch import nn

import lamina

lamina.init(partitions=2, microbatches=2)
model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


@lamina.step
def forward(x):
    return model(x)


forward(torch.randn(4, 4))
if lamina.rank() == int(sys.argv[1]):
    sys.exit(3)
forward(torch.randn(4, 4))
