# SPDX-License-Identifier: Apache-2.0
"""Cases of what a call depends on besides its arguments, for two ranks that are one pipeline. What changed between two
steps, or within one, is never answered as before."""

import contextlib
import copy
import itertools

import torch
from torch import nn

import lamina

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class ByMode(nn.Module):
    """Returns another shape in evaluation, and twice as much of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y.tanh() if self.training else 2 * y[:, :4].tanh()


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), ByMode(), nn.Tanh())


def compare(states, call=lambda model, x: model(x), steps=3):
    """Under each state, in their order and again and again, the model trains like the plain one. `state(model)` brings
    a model into it and gives the context that it is called in."""
    lamina.init(partitions=2, microbatches=2, timeout_s=30, auto_partition=False, default_partition=0)
    module = built()
    lamina.set_partition(module[1], 1)
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)

    def losses(state, module, x):
        with state(module):
            y = call(module, x)
        return y, y.float().square().mean()

    for round, state in itertools.product(range(steps), states):

        @lamina.step
        def step(x, state=state):
            y, loss = losses(state, module, x)
            if loss.requires_grad:
                model.backward(loss)
            return y, y.requires_grad

        model.zero_grad()
        plain.zero_grad()
        state(model.module)  # on every rank
        y, differentiable = step(BATCH)
        for microbatch, x in enumerate(BATCH.chunk(2)):
            wanted, loss = losses(state, plain, x)
            if loss.requires_grad:
                (loss / 2).backward()
            found = y.outputs[microbatch]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (round, state)
            assert differentiable[microbatch] == wanted.requires_grad, (round, state)
            assert torch.equal(found, wanted), (round, state)
        for name, parameter in model.local_named_parameters():
            grad = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (grad is None), (round, state, name)
            assert grad is None or torch.allclose(parameter.grad, grad, rtol=1e-6, atol=1e-7), (round, state, name)


def training(model):
    model.train()
    return contextlib.nullcontext()


def evaluation(model):
    model.eval()
    return contextlib.nullcontext()


def partly_in_training(model):
    model.train()
    model[1].eval()
    return contextlib.nullcontext()


def case_the_training_flag_changes_between_steps():
    compare([training, evaluation, partly_in_training])


def half(model):
    return torch.autocast("cpu", dtype=torch.bfloat16)


def other_half(model):
    return torch.autocast("cpu", dtype=torch.float16)


def plainly(model):
    return contextlib.nullcontext()


def case_autocast_changes_between_steps():
    compare([half, plainly, other_half])


def frozen(*names):
    def state(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)
        return contextlib.nullcontext()

    return state


FIRST = ("0.weight", "0.bias")
SECOND = ("1.linear.weight", "1.linear.bias")


def case_parameters_are_frozen_and_thawed_between_steps():
    compare([frozen(), frozen(*SECOND), frozen(*FIRST), frozen("1.linear.bias"), frozen(*FIRST, *SECOND), frozen()])


def without_grad(model):
    return torch.no_grad()


def case_grad_mode_changes_between_steps():
    compare([plainly, without_grad])


def case_modes_and_shapes_change_within_a_step():
    def call(model, x):
        parts = []
        for state in (plainly, half, without_grad, plainly, other_half):
            with state(model):
                parts.append(model[1](model[0](x)).float().sum(1))
        with torch.no_grad():
            parts.append(model[1](x.repeat(2, 1)).sum(1)[: len(x)])
        return torch.stack(parts)

    compare([training, partly_in_training], call)
