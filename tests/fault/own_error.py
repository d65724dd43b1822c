# SPDX-License-Identifier: Apache-2.0
"""own_error.py WHEN: trains a model over two ranks, whose last part raises. That is in the "first" step, for the trace
of the model, or in a "later" one, on rank 1."""

import sys

import torch
from torch import nn

import lamina

FAILS_IN = {"first": 0, "later": 1}[sys.argv[1]]


class Part(nn.Linear):
    def forward(self, x, look):
        return super().forward(x if look(x) else x[:, :4])


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(8, 8) for _ in range(4)])

    def forward(self, x):
        for part in self.parts[:-1]:
            x = part(x, torch.is_tensor)
        return self.parts[-1](x, is_good)  # the caller's line


def is_good(x):
    return len(x) == 2


def main():
    lamina.init(partitions=2, microbatches=2)
    model = lamina.distribute(Whole())

    @lamina.step
    def train(x):
        y = model(x)  # the body's line
        model.backward(y.sum())

    for step in range(3):
        train(torch.ones(6 if step == FAILS_IN else 4, 8))


if __name__ == "__main__":
    main()
