# SPDX-License-Identifier: Apache-2.0
"""Activations that leave a device for the memory of the host, of one rank."""

import emulated
import torch
from torch import nn

import lamina

LAYERS, ROWS, WIDTH = 12, 64, 64
ACTIVATION = 4 * ROWS * WIDTH  # bytes of a layer's input
KEYS = {"offload_activations": True}


class Training:
    """Layers that are computed again, each by itself."""

    def __init__(self, horizon=1, **keys):
        lamina.shutdown()
        lamina.init(activation_loading_horizon=horizon, **keys)
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(LAYERS)]
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
        self.model = lamina.DistributedModel(nn.Sequential(*layers).to("emulated"))
        for layer in self.model.module[:LAYERS]:
            lamina.set_activation_checkpointing(layer)
        self.optimizer = lamina.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to("emulated")

        @lamina.step
        def run(x):
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self.run = run

    def step(self):
        self.optimizer.zero_grad()
        loss = self.run(self.batch).reduce_mean()
        self.optimizer.step()
        return loss

    def values(self, steps=3):
        losses = [self.step() for _ in range(steps)]
        return [each.detach().cpu() for each in (*losses, *self.model.parameters())]


def peak(**keys):
    """The most bytes that a step takes besides what is there between steps."""
    training = Training(**keys)
    for _ in range(2):
        training.step()
    torch.accelerator.synchronize()
    emulated.reset_counts()
    before = emulated.counts()["bytes"][0]
    training.step()
    return emulated.counts()["peak_bytes"][0] - before


def case_the_peak_of_memory_is_lower_by_what_left_less_two():
    # The first layer's input is the batch, which the script has as well.
    left = (LAYERS - 1) * ACTIVATION
    assert peak() - peak(**KEYS) >= left - 2 * ACTIVATION


def case_what_comes_back_has_the_bits_that_left():
    expected = Training().values()
    for horizon in (1, 3, 20):
        for found, wanted in zip(Training(horizon, **KEYS).values(), expected, strict=True):
            assert torch.equal(found, wanted), horizon


def case_a_step_that_offloads_waits_for_nothing():
    training = Training(**KEYS)
    for _ in range(2):
        training.step()
    emulated.reset_counts()
    for _ in range(3):
        training.step()
    assert emulated.counts()["waits"] == 0


def case_steps_that_offload_leave_no_memory():
    training = Training(**KEYS)
    for _ in range(2):
        training.step()
    torch.accelerator.synchronize()
    emulated.reset_counts()
    before = emulated.counts()["bytes"]
    for _ in range(5):
        training.step()
    torch.accelerator.synchronize()
    assert emulated.counts()["bytes"] == before
