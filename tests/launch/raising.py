# SPDX-License-Identifier: Apache-2.0
"""raising.py WHERE RANK: a job of two ranks, of which RANK raises: in the forward of a module, in its data loader, or
after the last step. Or it exits there, with code 0, or goes on to a step that the other one does not make."""

import os
import sys

import torch
from torch import nn

import lamina

STEPS = 3


class Layer(nn.Linear):
    raises = False
    exits = False

    def forward(self, x):
        if self.exits:
            os._exit(0)
        if self.raises:
            raise ValueError("the user's own")
        return super().forward(x)


def main():
    where, own = sys.argv[1], int(sys.argv[2])
    lamina.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    layers = nn.Sequential(Layer(4, 4), Layer(4, 4))
    lamina.set_partition(layers[1], 1)
    model = lamina.distribute(layers)
    mine = lamina.rank() == own

    @lamina.step
    def train(x):
        model.backward(model(x).sum())

    for step in range(STEPS):
        if where == "loader" and mine and step == 2:
            raise ValueError("the user's own")
        layers[own].raises = where == "forward" and step == 2
        layers[own].exits = where == "exits" and step == 2
        train(torch.ones(4, 4))
    if where == "end" and mine:
        raise ValueError("the user's own")
    if where == "uneven" and mine:
        train(torch.ones(4, 4))


if __name__ == "__main__":
    main()
