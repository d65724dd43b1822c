# SPDX-License-Identifier: Apache-2.0
"""Ordinary optimizers of a distributed model."""

import pytest
import torch
from torch import nn

import lamina
from lamina import _lamina
from lamina.job import current
from lamina.modules.tree import ModuleTree
from lamina.optim.lent_optimizer import LentOptimizer

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def trim(optimizer, module, owners):
    """Makes it one of the part of partition 0, where layers have these owners."""
    rows = [(name, tensor, False, None) for name, tensor in module.named_parameters()]
    cut = _lamina.Cut(ModuleTree(module).filled(), [0, *owners], [], 0)
    table = _lamina.ParameterTable(current.session(), cut, rows)
    engine = _lamina.Optimizer(current.session(), _lamina.LossScale(1.0), 0, False)
    engine.parameters.set_model(lambda: table, None)
    engine.trim(LentOptimizer(optimizer, None, None))


def test_it_is_the_same_optimizer(start):
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    assert lamina.DistributedOptimizer(optimizer) is optimizer
    assert lamina.DistributedOptimizer(optimizer) is optimizer
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


@pytest.mark.filterwarnings("error")
def test_schedulers_made_before_and_after_it_see_its_steps(start):
    model = lamina.distribute(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    lamina.DistributedOptimizer(optimizer)
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_scale_without_a_model_is_an_error(start):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), dynamic_loss_scale=True)
    parameter.sum().backward()
    with pytest.raises(lamina.UsageError, match=r"call model.backward\(loss\)"):
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_foreign_parameters_leave_the_live_groups(make, start):
    module = layers()
    optimizer = make([{"params": list(layer.parameters()), "lr": 0.1} for layer in module])
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    groups = list(optimizer.param_groups)
    trim(optimizer, module, owners=[1, 0, 1])
    assert [len(group["params"]) for group in groups] == [0, 2, 0]
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert set(optimizer.state) <= set(module[1].parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert module[0].weight.grad is not None


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_rank_may_end_without_parameters(make, start):
    module = layers()
    optimizer = make(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trim(optimizer, module, owners=[1, 1, 1])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["params"] == [] and optimizer.param_groups[0]["lr"] == 0.05


def test_parameters_of_other_models_stay(start):
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    trim(optimizer, layers(), owners=[0, 0, 1])
    assert len(optimizer.param_groups[0]["params"]) == 2


SCALED_TWICE = [({"static_loss_scale": 2.0}, {}), ({"dynamic_loss_scale": True}, {"dynamic_loss_scale": True})]


@pytest.mark.parametrize("first, second", SCALED_TWICE)
def test_a_job_has_one_loss_scale(start, first, second):
    lamina.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **first)
    with pytest.raises(lamina.UsageError, match="a job has one loss scale"):
        lamina.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **second)


def test_how_scripts_of_the_original_ask_for_a_dynamic_scale(start):
    """They give what they have read of their command lines, None included."""
    optimizer = lamina.DistributedOptimizer(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    assert optimizer.state_dict()["loss_scale"]["scale"] == 2.0**32


@pytest.mark.parametrize(
    "args, text",
    [
        ({"window": 3}, "dynamic_loss_args has window; its names are init_scale, scale_factor,"),
        ({"scale_window": 0}, "scale_window is 0: it must be at least 1 step"),
        ({"scale_window": 1.5}, "is int, not 1.5"),
        ({"scale_factor": 1.0}, "scale_factor is 1: it must be a finite number above 1"),
        ({"init_scale": float("nan")}, "init_scale is -?nan"),
        ({"delayed_shift": 0}, "at least 1 overflow"),
    ],
)
def test_arguments_of_a_dynamic_scale_that_make_no_sense(start, args, text):
    with pytest.raises(lamina.UsageError, match=text):
        lamina.DistributedOptimizer(
            torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), dynamic_loss_scale=True, dynamic_loss_args=args
        )


def test_the_scale_stays_finite():
    """Gradients of zeros never overflow."""
    scale = _lamina.LossScale(init_scale=2.0**1000, scale_window=1)
    for _ in range(100):
        scale.update(overflow=False)
    largest = scale.value
    scale.update(overflow=True)
    assert scale.value == largest / 2


def test_the_scale_moves_as_described():
    """Two overflows make it smaller once; then each does, until a window without one."""
    scale = _lamina.LossScale(init_scale=64.0, scale_window=2, delayed_shift=2, min_scale=8.0)
    scales = []
    for overflow in (True, True, True, False, False, True, True, True, True, True, False):
        scale.update(overflow)
        scales.append(scale.value)
    assert scales == [64, 32, 16, 16, 32, 32, 16, 8, 8, 8, 8]


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
