# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks that trains: trained.py STEPS [END], where one more step ends as END says: a body "fails", or rank
1 "dies" in it."""

import os
import signal
import sys

import torch
from torch import nn

import lamina


class Layer(nn.Linear):
    dies = False

    def forward(self, x):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def main():
    lamina.init(partitions=2, microbatches=4, auto_partition=False, default_partition=0, timeout_s=60)
    layers = nn.Sequential(Layer(4, 4), Layer(4, 4))
    lamina.set_partition(layers[1], 1)
    model = lamina.distribute(layers)

    @lamina.step
    def step(x, fails):
        loss = model(x).square().mean()
        if fails:
            raise ValueError("on purpose")
        model.backward(loss)
        return loss

    for _ in range(int(sys.argv[1])):
        step(torch.ones(8, 4), False)
    if len(sys.argv) > 2:
        layers[1].dies = sys.argv[2] == "dies"
        step(torch.ones(8, 4), sys.argv[2] == "fails")


if __name__ == "__main__":
    main()
