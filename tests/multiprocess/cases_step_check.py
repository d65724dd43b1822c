# SPDX-License-Identifier: Apache-2.0
"""Cases of `verify_steps`, for two ranks that are one pipeline; they run in the launch of cases_pair."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.errors import UsageError


class Doubled(torch.autograd.Function):
    """Doubles gradients on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


FAULTS = {
    "none": lambda y: y,
    "scaled": lambda y: y * 1.001,
    "noise": lambda y: y + 0.01 * torch.rand_like(y),
    "not finite": lambda y: torch.where(y == y.max(), torch.inf, y),
    "gradient": Doubled.apply,
    "dropped": torch.Tensor.detach,
    "part": lambda y: torch.cat([y[:1].detach(), y[1:]]),
}


class Layer(nn.Module):
    """Draws, keeps statistics, and may have a fault on the second rank."""

    def __init__(self, fault):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.fault = fault

    def forward(self, x):
        y = self.dropout(torch.relu(self.norm(self.linear(x))))
        return x + (FAULTS[self.fault](y) if lamina.rank() == 1 else y)


class Net(nn.Module):
    def __init__(self, fault, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList([Layer(fault if number == 2 else "none") for number in range(4)])
        self.head = nn.Linear(6, 3)
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


@lamina.step
def train(model, x, target):
    loss = nn.functional.cross_entropy(model(x), target)
    model.backward(loss)
    return loss


def run(fault, steps=2, recompute=False, **keys):
    """Trains, with layer 2 on the second rank; returns the losses."""
    lamina.init(
        **{"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0, "timeout_s": 30} | keys
    )
    torch.manual_seed(0)
    model = Net(fault, recompute)
    for layer in model.layers[1:3]:
        lamina.set_partition(layer, 1)
    model = lamina.DistributedModel(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x, target = torch.randn(8, 6, generator=batch), torch.randint(3, (8,), generator=batch)
        losses.append(train(model, x, target).reduce_mean().item())
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    lamina.shutdown()
    return losses, state


def case_a_step_that_is_the_plain_one_goes_on_as_without_a_check():
    for recompute in (False, True):
        losses, state = run("none", recompute=recompute, deterministic_server=True)
        checked = run("none", recompute=recompute, deterministic_server=True, verify_steps=1)
        assert checked[0] == losses
        for name, value in state.items():
            torch.testing.assert_close(checked[1][name], value, rtol=0, atol=0)


def case_a_step_that_differs_is_an_error_on_all_ranks_that_names_the_module():
    for fault in FAULTS:
        if fault == "none":
            continue
        with pytest.raises(
            UsageError, match=r"(?s)this step is not that of the plain model.*layers\.[12].*\[step-differs\]"
        ):
            run(fault, verify_steps=1)
        lamina.shutdown()


def case_the_check_says_what_differs_first():
    for fault, words in (("scaled", "output of layers.2 on rank 1 differs"), ("gradient", "gradient of the output of")):
        with pytest.raises(UsageError, match=words):
            run(fault, verify_steps=1)
        lamina.shutdown()
