# SPDX-License-Identifier: Apache-2.0
"""A Trainer, and steps, on a device whose memory is small."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lamina
from lamina.errors import UsageError
from lamina.trainer import ComposerModel, Trainer


class Wide(ComposerModel):
    """Each sample takes much more memory than all values of the model."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch):
        return self.layers(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def trained(width, device):
    torch.manual_seed(0)
    model = Wide(width)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader([torch.ones(16, 2)], batch_size=None),
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration="1ep",
        device_train_microbatch_size="auto",
        device=device,
        precision="fp32",
        seed=1,
    )
    trainer.fit()
    return trainer.state.device_train_microbatch_size, trainer.state.model.state_dict()["layers.0.weight"].cpu()


def case_microbatches_halve_where_the_memory_of_the_device_ends():
    size, value = trained(64_000, "gpu")
    assert size < 16
    whole, expected = trained(64_000, "cpu")
    assert whole == 16
    torch.testing.assert_close(value, expected)


def case_one_sample_that_is_too_large_is_an_error():
    with pytest.raises(UsageError, match="out of memory with microbatches of one sample") as caught:
        trained(300_000, "gpu")
    assert caught.value.code == "trainer-memory"


WIDTH, BATCH = 300, 6000  # a layer of 353 KiB, and activations of 6.9 MiB
HELD = "It had 352.7 KiB of parameters and buffers, 352.7 KiB of gradients, 705.5 KiB of optimizer states, and up to "


class WideBackward(torch.autograd.Function):
    """Has no room in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_ones(BATCH, WIDTH)[:10]


def expect_full(run, where):
    """`run()` finds no room in that module."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    torchs, line = str(caught.value).splitlines()
    assert torchs.startswith("emulated out of memory. Tried to allocate ")
    assert line.startswith(f"rank 0 of 1: the memory of emulated:0 was full{where}. {HELD}"), line
    assert "activations shrink with more microbatches (1), activation checkpointing" in line
    assert "sharded_data_parallel_degree (1), partitions (1)" in line


def case_an_error_says_what_the_memory_was_for():
    gc.collect()  # of the case before: what its error had met
    lamina.init(device="gpu")
    layers = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.ReLU())
    model = lamina.DistributedModel(layers)
    optimizer = torch.optim.Adam(model.parameters())

    @lamina.step
    def step(x):
        model.backward(model(x).sum())

    step(torch.ones(2, WIDTH, device=lamina.device()))
    optimizer.step()
    batch = torch.ones(1, WIDTH, device=lamina.device()).expand(BATCH, WIDTH)
    expect_full(lambda: step(batch), " in 0.0")
    expect_full(lambda: model(batch), " in 0.0")
    loss = WideBackward.apply(model(batch[:10])).sum()
    expect_full(lambda: model.backward(loss), "")
