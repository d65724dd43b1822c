# SPDX-License-Identifier: Apache-2.0
"""Ordinary optimizers of a distributed model."""

import pytest
import torch
from torch import nn

import lamina
from lamina import _lamina
from lamina.model.partitioned import PartitionedModel
from lamina.modules.tree import ModuleTree
from lamina.optim.param_groups import Roster

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]


def cut(partition):
    """A model of three layers, of which partition 1 owns the middle one."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tree = ModuleTree(module)
    cut = _lamina.Cut(tree.filled(), [0, 0, 1, 0], [], partition)
    return module, PartitionedModel(tree, cut, {}, session=None)


def test_it_is_the_same_optimizer(start):
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    assert lamina.DistributedOptimizer(optimizer) is optimizer
    assert lamina.DistributedOptimizer(optimizer) is optimizer
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_foreign_parameters_leave_the_live_groups(make):
    module, model = cut(partition=1)
    optimizer = make([{"params": list(layer.parameters()), "lr": 0.1} for layer in module])
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    groups = list(optimizer.param_groups)
    Roster(optimizer).trim(model)
    assert [len(group["params"]) for group in groups] == [0, 2, 0]
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert set(optimizer.state) <= set(module[1].parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert module[0].weight.grad is not None


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_rank_may_end_without_parameters(make):
    module, model = cut(partition=5)
    optimizer = make(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    Roster(optimizer).trim(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["params"] == [] and optimizer.param_groups[0]["lr"] == 0.05


def test_parameters_of_other_models_stay():
    _, model = cut(partition=0)
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    Roster(optimizer).trim(model)
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    "options", [{"static_loss_scale": 2.0}, {"dynamic_loss_scale": True}, {"dynamic_loss_args": {"min_scale": 1}}]
)
def test_loss_scaling_is_not_there_yet(start, options):
    with pytest.raises(lamina.UsageError, match="loss scaling is not available yet"):
        lamina.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    "option, text",
    [({"static_loss_scale": "1"}, "a number above 0, not '1'"), ({"dynamic_loss_scale": "no"}, "True or False, not")],
)
def test_options_of_another_type_are_an_error(start, option, text):
    with pytest.raises(lamina.UsageError, match=f"{next(iter(option))} is {text}"):
        lamina.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **option)


def test_what_is_no_optimizer(start):
    with pytest.raises(lamina.UsageError, match="not list"):
        lamina.DistributedOptimizer([])
