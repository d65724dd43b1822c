# SPDX-License-Identifier: Apache-2.0
"""Sleeping devices: stages that sleep, without the GIL, where a device would compute.

Wall time then shows the schedule and what the engine adds to it, whatever the machine's cores can do.
"""

import statistics
import time

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Stage(nn.Module):
    """x -> x, after `forward_s`; its backward takes `backward_s`. Has one parameter, as a stage that learns has.

    Of the backward `weights_s` are for the parameter, in a node of its own, and all where nobody wants a gradient of x.
    """

    def __init__(self, forward_s: float, backward_s: float, weights_s: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward_s, backward_s, weights_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, backward_s, weights_s = self.seconds
        weights_s = weights_s if x.requires_grad else backward_s
        return _Sleep.apply(x, forward_s, backward_s - weights_s) + _Sleep.apply(self.weight, 0.0, weights_s)


def slow_down(module: nn.Module, forward_s: float, backward_s: float) -> None:
    """From now on a call of the module takes so much longer, as on a device of its own, and so does its backward."""

    def forward(self, *args):
        return _Sleep.apply(super(slow, self).forward(*args), forward_s, backward_s)

    slow = type(f"Slow{type(module).__name__}", (type(module),), {"forward": forward})
    module.__class__ = slow


def seconds_alone(stage: Stage, x: torch.Tensor, repetitions: int = 10) -> float:
    """The median of a forward and a backward of the stage with nothing around them: what the ideal is made of."""
    samples = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        stage(x.detach().requires_grad_()).sum().backward()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)
