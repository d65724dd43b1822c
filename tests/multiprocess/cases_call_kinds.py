# SPDX-License-Identifier: Apache-2.0
"""Cases of what a call depends on besides its arguments, for two ranks that are one pipeline. What changed between two
steps, or within one, is never answered as before."""

import contextlib
import contextvars
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


VARIABLE = contextvars.ContextVar("variable", default=0)


class Seen(nn.Module):
    """Returns all that it sees of the modes that it is called in, and whether the sum of its argument is positive."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))

    def forward(self, x):
        modes = [module.training for module in self.modules()]
        modes += [parameter.requires_grad for parameter in self.parameters()]
        modes += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        modes += [torch.are_deterministic_algorithms_enabled()]
        modes += [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu") == torch.float16]
        modes += [torch.get_default_dtype() == torch.float64, VARIABLE.get(), x.detach().sum() > 0]
        return torch.tensor([float(mode) for mode in modes], dtype=torch.float32)


@contextlib.contextmanager
def training_of(module, mode):
    before = module.training
    module.training = mode
    try:
        yield
    finally:
        module.training = before


@contextlib.contextmanager
def requiring_grad(parameter, flag):
    before = parameter.requires_grad
    parameter.requires_grad = flag
    try:
        yield
    finally:
        parameter.requires_grad = before


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def variable(value):
    token = VARIABLE.set(value)
    try:
        yield
    finally:
        VARIABLE.reset(token)


# Each changes one thing that a call takes along, for as long as its context lasts.
CHANGES = {
    "nothing": plainly,
    "autocast": half,
    "another autocast": other_half,
    "no grad": without_grad,
    "inference": lambda module: torch.inference_mode(),
    "evaluation": lambda module: training_of(module, False),
    "evaluation of a module inside": lambda module: training_of(module.inner[1], False),
    "evaluation of the last module": lambda module: training_of(module.inner[2], False),
    "a frozen weight": lambda module: requiring_grad(module.inner[0].weight, False),
    "the last parameter frozen": lambda module: requiring_grad(module.inner[2].bias, False),
    "default dtype": lambda module: default_dtype(torch.float64),
    "a context variable": lambda module: variable(1),
    "another context variable": lambda module: variable(2),
}


def case_each_call_sees_what_has_changed_since_the_one_before():
    lamina.init(partitions=2, microbatches=2, timeout_s=30, auto_partition=False, default_partition=0)
    module = nn.Sequential(nn.Identity(), Seen())
    plain = copy.deepcopy(module[1])
    lamina.set_partition(module[1], 1)
    model = lamina.distribute(module)
    order = [name for pair in itertools.pairwise(CHANGES) for name in (*pair, "nothing")]

    @lamina.step
    def step(x):
        model(x)
        seen = []
        for name in order:
            with CHANGES[name](module[1]):
                seen.append(module[1](x))
        return torch.stack([each.clone() for each in seen])

    for round in range(3):
        found = step(BATCH)
        wanted = []
        for name in order:
            with CHANGES[name](plain):
                wanted.append(plain(BATCH[:4]))
        for x, seen in zip(BATCH.chunk(2), found.outputs, strict=True):
            for name, one, other in zip(order, seen, wanted, strict=True):
                other = torch.cat([other[:-1], (x.sum() > 0).float().reshape(1)])
                assert torch.equal(one, other), (round, name, one, other)


def case_deterministic_algorithms_and_hooks_change_between_steps():
    lamina.init(partitions=2, microbatches=2, timeout_s=30, auto_partition=False, default_partition=0)
    module = nn.Sequential(nn.Identity(), Seen())
    lamina.set_partition(module[1], 1)
    model = lamina.distribute(module)
    step = lamina.step(lambda x: (model(x), module[1](x))[1].clone())
    deterministic = len(list(module[1].modules())) + len(list(module[1].parameters())) + 2
    for flag, hooked in ((False, False), (True, False), (True, True), (False, True), (False, False)):
        torch.use_deterministic_algorithms(flag)
        handle = module[1].register_forward_hook(lambda module, args, output: output + 10) if hooked else None
        try:
            seen = step(BATCH).outputs[0]
        finally:
            torch.use_deterministic_algorithms(False)
            if handle is not None:
                handle.remove()
        assert seen[deterministic] == flag + 10 * hooked, (flag, hooked, seen)
