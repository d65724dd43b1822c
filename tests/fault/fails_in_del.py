# SPDX-License-Identifier: Apache-2.0
"""Trains with arguments, outputs, contexts of backwards and a module's attributes whose `__del__` fails."""

import copy
import gc
import os

import torch
from torch import nn

import lamina


class Fails:
    count = 0

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __del__(self):
        Fails.count += 1
        raise ValueError("in __del__")


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = Fails(1)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Layer(nn.Linear):
    def forward(self, x, number):
        self.latest = Fails(number.number)
        return Keeps.apply(super().forward(x)), Fails(number.number + 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(4, 4) for _ in range(4)])

    def forward(self, x):
        number = Fails(0)
        for layer in self.layers:
            x, number = layer(x, number)
        return x, number.number


def main():
    lamina.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    for i, layer in enumerate(model.layers):
        lamina.set_partition(layer, i % 2)
    model = lamina.distribute(model)

    @lamina.step
    def train(x):
        y, number = model(x)
        loss = y.square().mean()
        model.backward(loss)
        return loss, number

    for _ in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        loss, numbers = train(x)
        assert numbers == [4, 4]
        expected, _ = plain(x)
        assert torch.allclose(loss.reduce_mean(), expected.square().mean())
    gc.collect()
    assert Fails.count > 20, Fails.count
    lamina.shutdown()
    print("trained on", os.environ["RANK"])


if __name__ == "__main__":
    main()
