# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the user's modules in a pipeline of three ranks. Each case begins without a job; every rank runs it."""

import copy
import os

import pytest
import torch
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class MyError(Exception):
    """Its __init__ takes what its args do not hold."""

    def __init__(self, code, *, unit):
        super().__init__(f"{code} {unit}")
        self.code = code


class Part(nn.Module):
    """Fails in forward, in its second run, or in its backward, as long as `broken` says so."""

    broken = ""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if self.broken == "forward" or (self.broken == "second run" and torch.is_grad_enabled()):
            raise MyError(7, unit="volts")
        y = self.linear(x).tanh()
        if self.broken == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient):
        raise MyError(7, unit="volts")


class KeepsForBackward(torch.autograd.Function):
    """Its forward does not look at what its backward reads."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * kept, None


class Calls(nn.Module):
    """Calls its child."""

    def __init__(self, child):
        super().__init__()
        self.child = child
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(self.child(x))


def build(*owners, make=lambda: nn.ModuleList([Part(), Part(), Part()])):
    """A model of parts that live on the given ranks, and a copy."""
    keys = {"partitions": 3, "microbatches": 4, "timeout_s": 30, "auto_partition": False, "default_partition": 0}
    lamina.init(**keys)
    torch.manual_seed(0)
    parts = make()
    plain = copy.deepcopy(parts)
    for part, owner in zip(parts, owners, strict=True):
        lamina.set_partition(part, owner)
    return lamina.distribute(parts), plain


def fails_and_goes_on(body, owners, culprit, place="forward", where="in forward", make=None):
    """A step of `body(parts, x)`, which works, fails where `parts[culprit]` lives, and works again.

    Twice it fails: after steps that worked results are references, in the first step they are waited for.
    """
    model, plain = build(*owners, **({"make": make} if make else {}))
    parts = model.module

    @lamina.step
    def step(x):
        loss = body(parts, x)
        model.backward(loss)
        return loss

    def fails():
        breaks(parts[culprit], place)
        try:
            step(BATCH)
        except MyError as error:
            caught = error
        assert str(caught).startswith("7 volts") and caught.code == 7
        tells_where(caught, owners[culprit], where)
        breaks(parts[culprit], "")
        model.zero_grad()

    def works():
        model.zero_grad()
        plain.zero_grad()
        expected = body(plain, BATCH)
        expected.backward()
        assert torch.allclose(step(BATCH).reduce_mean(), expected, atol=1e-6)
        for name, parameter in model.local_named_parameters():
            grad = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (grad is None), name
            assert grad is None or torch.allclose(parameter.grad, grad, atol=1e-6), name

    fails()
    for _ in range(3):
        works()
    for _ in range(2):
        fails()
        works()


def tells_where(error, rank, where):
    """A caller on another rank learns the rank and the line. On the rank itself it may be the exception itself."""
    assert isinstance(error, lamina.RemoteError) or rank == RANK
    if isinstance(error, lamina.RemoteError):
        assert error.rank == rank
        assert where in error.remote_traceback and "cases_failures.py" in error.remote_traceback
        assert 'raise MyError(7, unit="volts")' in error.remote_traceback


def breaks(part, place):
    for module in part.modules():
        if isinstance(module, Part):
            module.broken = place


def read_at_once(parts, x):
    y = parts[1](parts[0](x))
    y.tolist()
    return parts[2](y).square().mean()


def passed_on(parts, x):
    return parts[2](parts[1](parts[0](x))).square().mean()


def never_read(parts, x):
    parts[1](x)
    return parts[0](x).square().mean()


def case_a_result_that_is_read_at_once():
    fails_and_goes_on(read_at_once, (0, 1, 2), 1)


def case_a_result_that_is_passed_on_to_another_rank():
    fails_and_goes_on(passed_on, (0, 1, 2), 1)


def case_a_result_that_is_passed_on_to_the_same_rank():
    fails_and_goes_on(passed_on, (1, 1, 1), 1)


def case_a_result_that_nobody_reads():
    fails_and_goes_on(never_read, (0, 1, 2), 1)


def case_a_result_that_is_read_in_backward():
    def body(parts, x):
        kept = parts[1](x).detach()
        return KeepsForBackward.apply(parts[0](x), kept).square().mean()

    fails_and_goes_on(body, (0, 1, 2), 1)


def case_a_module_of_the_leading_rank():
    fails_and_goes_on(passed_on, (1, 0, 2), 1)


def case_the_last_module():
    fails_and_goes_on(passed_on, (0, 1, 2), 2)


def case_a_backward_hook():
    fails_and_goes_on(passed_on, (0, 1, 2), 1, "backward", "in fail")


def case_a_backward_hook_of_the_leading_rank():
    fails_and_goes_on(passed_on, (1, 0, 2), 1, "backward", "in fail")


def nested():
    return nn.ModuleList([Calls(Part()), Part(), Part()])


def case_a_child_of_a_remote_parent_on_the_leading_rank():
    def make():
        parts = nested()
        lamina.set_partition(parts[0].child, 0)
        return parts

    def body(parts, x):
        return parts[2](parts[0](x)).square().mean()

    fails_nested(body, make, 1, 0)


def fails_nested(body, make, parent, child):
    """As fails_and_goes_on, with the culprit inside parts[0]."""
    model, _ = build(parent, 0, 2, make=make)
    parts = model.module
    step = lamina.step(lambda x: body(parts, x))
    for broken in ("forward", "", "", "forward", "", "forward"):
        parts[0].child.broken = broken
        if not broken:
            step(BATCH)
            continue
        with pytest.raises(MyError) as caught:
            step(BATCH)
        tells_where(caught.value, child, "in forward")


def case_inside_a_checkpointed_region():
    def make():
        parts = nn.ModuleList([Part(), Part(), Part()])
        lamina.set_activation_checkpointing(parts)
        return parts

    fails_and_goes_on(passed_on, (0, 1, 2), 1, make=make)


def case_in_the_second_run_of_a_checkpoint_around_it():
    def body(parts, x):
        return lamina.checkpoint(Chain(parts), x).square().mean()

    fails_and_goes_on(body, (0, 1, 2), 1, "second run")


class Chain(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def case_the_body_may_catch_it_where_it_reads():
    model, _ = build(0, 1, 2)
    parts = model.module

    @lamina.step
    def step(x):
        try:
            return parts[2](parts[1](x)).sum().item()
        except MyError as error:
            return error.code, error.rank

    for broken in ("", "", "forward", "", "forward"):
        parts[1].broken = broken
        got = step(BATCH)
        assert (got == ([7] * 4, [1] * 4)) == bool(broken), got


class Other(Part):
    kind = ValueError

    def forward(self, x):
        if self.broken:
            raise self.kind("mine")
        return self.linear(x)


def case_errors_of_the_engines_types_keep_them():
    """Exceptions that a user's module raises itself."""
    model, _ = build(0, 1, 2, make=lambda: nn.ModuleList([Other(), Other(), Other()]))
    parts = model.module
    step = lamina.step(lambda x: passed_on(parts, x))
    for kind in (
        lamina.PeerError,
        lamina.TimeoutError,
        TimeoutError,
        lamina.UsageError,
        ConnectionError,
        StopIteration,
        GeneratorExit,
        OSError,
        KeyError,
        torch.OutOfMemoryError,
        NotImplementedError,
        IndexError,
    ):
        for broken in (True, False, False, True):
            parts[1].kind, parts[1].broken = kind, broken
            if not broken:
                step(BATCH)
                continue
            with pytest.raises(kind if issubclass(kind, Exception) else lamina.RemoteError, match="mine") as caught:
                step(BATCH)
            if RANK != 1:
                assert isinstance(caught.value, lamina.RemoteError) and caught.value.rank == 1
