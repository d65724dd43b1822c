# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks that trains: trained.py STEPS [FAILS], which says that a body fails in one more step."""

import sys

import torch
from torch import nn

import lamina


def main():
    lamina.init(partitions=2, microbatches=4, auto_partition=False, default_partition=0, timeout_s=60)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
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
        step(torch.ones(8, 4), True)


if __name__ == "__main__":
    main()
