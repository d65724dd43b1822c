# SPDX-License-Identifier: Apache-2.0
"""A layer that tells a script where it is, in its forward and its backward."""

import torch
from torch import nn


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reaches):
        ctx.reaches = reaches
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reaches("backward")
        return gradient, None


class Layer(nn.Linear):
    step = 0  # the number of the step that the script makes

    def reaches(self, place):
        raise NotImplementedError

    def forward(self, x):
        self.reaches("forward")
        return Passes.apply(super().forward(x), self.reaches)
