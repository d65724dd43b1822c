# SPDX-License-Identifier: Apache-2.0
"""A model that draws random numbers in many ways, trained in any layout: the numbers are to be the same in all."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina

WIDTH = 6
BATCH = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """Draws itself, before and after its children do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.more = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(), nn.AlphaDropout(0.2))

    def forward(self, x):
        noisy = F.dropout(x, 0.2, self.training)
        y = self.more(self.drop(F.gelu(self.linear(noisy))))
        return y + 0.1 * torch.randn(3, 1).mean()  # fewer than 16 normals: the generator keeps one


class Net(nn.Module):
    """`reentrant`: what kind of activation checkpoint is around each block; None for none."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.dropout(x, 0.5, self.training).square().mean()


@dataclass
class Trained:
    losses: list[torch.Tensor]  # of each step, by microbatch
    gradients: dict[str, torch.Tensor]  # of the modules that this rank owns
    generators: list[torch.Tensor]  # after each step
    drawn: list[torch.Tensor]  # by the step bodies after the model


def train(partitions, *, reentrant=None, manual_seed=5, batch=BATCH, replica=None, **keys):
    """Two steps, with the modules dealt out to the partitions in turn. What this rank has afterwards, or `replica`."""
    by_hand = {"auto_partition": False, "default_partition": 0} if partitions > 1 else {}
    lamina.init({"partitions": partitions, "microbatches": 4, "timeout_s": 30} | by_hand | keys)
    torch.manual_seed(0)
    net = Net(reentrant).double()
    if partitions > 1:
        called = (module for module in net.modules() if module is not net and not isinstance(module, nn.ModuleList))
        for module, partition in zip(called, itertools.cycle(range(partitions - 1, -1, -1)), strict=False):
            lamina.set_partition(module, partition)
    model = lamina.distribute(net)

    @lamina.step
    def step(x):
        loss = model(x)
        model.backward(loss)
        return loss, torch.rand(2)

    torch.manual_seed(manual_seed)
    losses, generators, drawn = [], [], []
    for _ in range(2):
        loss, after = step(batch)
        losses.append(loss.stack())
        drawn.append(after.stack())
        generators.append(torch.get_rng_state())
    gradients = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    trained = Trained(losses, gradients, generators, drawn)
    if replica is not None:
        trained = lamina.allgather(trained, lamina.WORLD)[replica]
    lamina.shutdown()
    return trained


def assert_same(trained, expected):
    for one, other in zip(trained.losses, expected.losses, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(trained.drawn, expected.drawn, strict=True):
        assert torch.equal(one, other)
    for name, gradient in trained.gradients.items():
        assert torch.allclose(gradient, expected.gradients[name], rtol=1e-9, atol=1e-12), name
    for one, other in zip(trained.generators, expected.generators, strict=True):
        assert torch.equal(one, other), "the generator of the process after a step"


def assert_different(trained, other):
    assert not any(torch.equal(a, b) for a, b in zip(trained.losses, other.losses, strict=True))
