# SPDX-License-Identifier: Apache-2.0
"""A training script with a fault, named by its first argument, that only the layout has.

lamina verify -n 2 tests/verify/faulty.py FAULT
"""

import sys

import torch
from torch import nn

import lamina

SIZE, CLASSES, LAYERS = 8, 4, 4


class Doubled(torch.autograd.Function):
    """Doubles gradients on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.dropout(torch.relu(self.norm(self.linear(x))))
        return x + (self.spoiled(y) if self.number == 2 and fault_is_here() else y)

    def spoiled(self, y):
        match FAULT:
            case "output":
                return y * 1.001
            case "sign":
                return -y
            case "noise":
                return y + 0.01 * torch.randn_like(y)
            case "shuffled":
                return y.flip(0)
            case "not_finite":
                return torch.where(y == y.max(), torch.inf, y)
            case "half":
                return y.bfloat16().float()
            case "doubled_gradient":
                return Doubled.apply(y)
            case "dropped_gradient":
                return y.detach()
            case "dropped_part":
                return torch.cat([y[:1].detach(), y[1:]])
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(number) for number in range(LAYERS)])
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


def fault_is_here():
    return lamina.size() > lamina.dp_size()


FAULT = sys.argv[1] if len(sys.argv) > 1 else "none"


def main():
    lamina.init(partitions=2, microbatches=2, ddp=True)
    torch.manual_seed(0)
    model = lamina.DistributedModel(Model())
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @lamina.step
    def train(model, x, target):
        loss = nn.functional.cross_entropy(model(x), target)
        model.backward(loss)
        return loss

    def spoil(fault):
        return fault == FAULT and fault_is_here()

    torch.manual_seed(lamina.dp_rank())
    for _ in range(10):
        optimizer.zero_grad()
        train(model, torch.randn(8, SIZE), torch.randint(CLASSES, (8,)))
        own = [each for name, each in model.local_named_parameters() if each.grad is not None]
        with torch.no_grad():
            if spoil("skipped_parameter") and model.partitioned:
                for name, each in model.local_named_parameters():
                    if name == "layers.2.linear.weight":
                        each.grad = None
            if spoil("wrong_clip"):
                for each in own:
                    each.grad.mul_(0.5)
        optimizer.step()
        with torch.no_grad():
            if spoil("written_parameter"):
                for name, each in model.local_named_parameters():
                    if name == "layers.2.linear.weight":
                        each.mul_(1.01)
            if spoil("stale_buffer"):
                for name, each in model.local_named_buffers():
                    if name == "layers.2.norm.running_mean":
                        each.zero_()
            if spoil("rate"):
                optimizer.param_groups[0]["lr"] = 0.2
    print("the script has gone on")


main()
