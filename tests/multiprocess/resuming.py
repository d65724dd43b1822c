# SPDX-License-Identifier: Apache-2.0
"""A training that is stopped and goes on elsewhere: to be equal bit for bit to one that was not stopped."""

import copy

import torch
from multiprocess.steps import train_step
from torch import nn

import lamina

BATCHES = torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(4))
STOPS_AFTER = 3


class Net(nn.Module):
    """Has a tied weight, a buffer, a frozen parameter and one that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.last.weight = self.inner[0].weight
        self.inner[1].bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x))


def build():
    torch.manual_seed(0)
    return Net()


def optimizer_of(model):
    """Two groups, in another order than the model's."""
    first = [p for name, p in model.named_parameters() if name.startswith("last") or name.endswith("bias")]
    rest = [p for p in model.parameters() if not any(p is other for other in first)]
    return torch.optim.AdamW([{"params": first, "lr": 0.02}, {"params": rest, "weight_decay": 0.1}], lr=0.01)


class Run:
    """A training by plain torch, or with `partitions` by lamina."""

    def __init__(self, partitions=None):
        if partitions is None:
            self.model = build()
            self.optimizer = optimizer_of(self.model)
            return
        lamina.init(partitions=partitions, microbatches=1, timeout_s=30)
        self.model = lamina.distribute(build())
        self.optimizer = lamina.DistributedOptimizer(optimizer_of(self.model))
        self.step = train_step(self.model)

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            if hasattr(self, "step"):
                self.step(batch)
            else:
                self.model(batch).square().mean().backward()
            self.optimizer.step()
        return self

    def states(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, states):
        states = copy.deepcopy(states)  # torch's optimizers go on in the tensors they are given
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        return self


def uninterrupted():
    return Run().train(BATCHES)


def stopped(partitions=None):
    return Run(partitions).train(BATCHES[:STOPS_AFTER])


def goes_on(run):
    """Trains the rest; the run ends as the uninterrupted one of plain torch."""
    equal(run.train(BATCHES[STOPS_AFTER:]).states(), uninterrupted().states())


def equal(ours, theirs):
    """Equal bit for bit: dictionaries in the same order, tensors, and whatever else is in them."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), (list(ours), list(theirs))
        for key in theirs:
            equal(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            equal(*pair)
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    else:
        assert ours == theirs
