# SPDX-License-Identifier: Apache-2.0
"""leaves.py RANK [CODE [saves]]: that rank ends, with exit code 3, while the other one waits for it in a step, or for
the model's state."""

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
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
model.state_dict() if "saves" in sys.argv else forward(torch.randn(4, 4))
