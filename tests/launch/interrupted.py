# SPDX-License-Identifier: Apache-2.0
"""A job that trains until it is interrupted: interrupted.py SCHEDULE PARTITIONS. Each rank says who it is in its file.

Its modules wait in forward and backward, so that a moment drawn at random may be anywhere in a step.
"""

import os
import pathlib
import sys
import time

import torch
from torch import nn

import lamina


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        return Waits.apply(super().forward(x))


def main():
    partitions = int(sys.argv[2])
    lamina.init(partitions=partitions, microbatches=4, schedule=sys.argv[1], ddp=True)
    model = lamina.distribute(nn.Sequential(*(Layer(4, 4) for _ in range(3))))

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for step in range(10000):
        train(torch.randn(8, 4))
        if step == 2:  # results are references by now
            pathlib.Path(os.environ["DIR"], "ready-" + os.environ["RANK"]).write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
