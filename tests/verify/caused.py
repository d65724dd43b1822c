# SPDX-License-Identifier: Apache-2.0
"""A training script of a layer that computes otherwise in a layout, for a cause that its first argument names.

lamina verify -n 2 tests/verify/caused.py CAUSE
"""

import os
import sys

import torch
from torch import nn

import lamina

SIZE = 4
CAUSE, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 9


def config():
    return {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0, "timeout_s": 60}


if CAUSE != "no_lamina":
    lamina.init(config())
IN_LAYOUT = CAUSE != "no_lamina" and lamina.size() > 1

READS = IN_LAYOUT and CAUSE == "reads"
SCALE = 3 if READS else 2
TABLE = {"scale": [torch.tensor([1.0, 3.0 if READS else 2.0])], "same": 1.5}
os.environ["SCALE"] = "3" if READS else "2"


def scaled(x):
    x = x * SCALE * TABLE["scale"][0][1] * int(os.environ["SCALE"])
    return x * (1 + lamina.rank()) if CAUSE in ("reads", "rank") else x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + lamina.rank())


class First(nn.Linear):
    def forward(self, x):
        os.environ["SCALE"] = "2"
        return super().forward(x)


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.factor = 0.75 if READS else 0.5

    def forward(self, x):
        if CAUSE == "backward":
            x = Scaled.apply(x)
        return scaled(super().forward(x)) * self.factor


def main():
    if CAUSE == "no_lamina":
        return
    torch.manual_seed(0)
    layers = nn.Sequential(First(SIZE, SIZE), Layer())
    lamina.set_partition(layers[1], 1)
    if CAUSE == "no_steps":
        return
    model = lamina.distribute(layers)
    rate = 0.2 if IN_LAYOUT and CAUSE == "rate" else 0.1
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate))

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(1)
    for step in range(STEPS):
        if step == 1 and CAUSE == "fails":
            raise ValueError("on purpose")
        print("the script's own words")
        optimizer.zero_grad()
        train(torch.randn(8, SIZE))
        optimizer.step()


main()
