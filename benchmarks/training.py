# SPDX-License-Identifier: Apache-2.0
"""The step of lamina that the benchmarks of the demo's model take."""

from collections.abc import Callable

import torch

import lamina


def lamina_step(model, optimizer) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Forward, backward and update, which every rank calls; gives the losses of the microbatches."""

    @lamina.step
    def forward_and_backward(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    def step(x, y):
        losses = forward_and_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step
