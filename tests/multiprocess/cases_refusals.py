# SPDX-License-Identifier: Apache-2.0
"""Cases of what a call of another rank cannot be part of, for two ranks that are one pipeline."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from multiprocess.steps import said_on_stderr
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lamina

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def grad(there, x):
    return torch.func.grad(lambda x: there(x).sum())(x)


def vmap(there, x):
    return torch.func.vmap(there)(x)


def jvp(there, x):
    return torch.func.jvp(there, (x,), (torch.ones_like(x),))


def forward_mode(there, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(there(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))), x)


def dispatch_mode(there, x):
    with Sees():
        return there(x)


def selective_checkpoint(there, x):
    policy = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return checkpoint(there, x, use_reentrant=False, context_fn=policy)


def function_mode(there, x):
    with torch.device("meta"):
        return there(x)


def second_order(there, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(there(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def is_refused(use, says):
    """Calling a remote module in `use` is an error that names it, each time; before and after, a step trains."""
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    lamina.set_partition(module[1], 1)
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    plain(BATCH).square().mean().backward()

    @lamina.step
    def trains(x):
        model.backward(model(x).square().mean())

    refused = lamina.step(lambda x: use(module[1], x))
    for fails in (True, False, True, True, False):
        if fails:
            with pytest.raises(lamina.UsageError, match=says):
                refused(BATCH)
            continue
        model.zero_grad()
        trains(BATCH)
        for name, parameter in model.local_named_parameters():
            assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6), name


WHERE = r"1,? which (lives|runs) on another rank"
REMEDY = r"call it outside, or place it in its caller's partition with set_partition"


def case_a_call_inside_grad_is_refused():
    is_refused(grad, rf"{WHERE}, was called inside a transform of torch\.func .*{REMEDY}")


def case_a_call_inside_vmap_is_refused():
    is_refused(vmap, rf"{WHERE}, was called inside a transform of torch\.func .*{REMEDY}")


def case_a_call_inside_jvp_is_refused():
    is_refused(jvp, rf"{WHERE}, was called inside a transform of torch\.func .*{REMEDY}")


def case_a_call_with_a_tangent_is_refused():
    is_refused(forward_mode, rf"{WHERE}, was called with a tangent of forward-mode AD.*{REMEDY}")


def case_a_call_under_a_dispatch_mode_is_refused():
    is_refused(dispatch_mode, rf"{WHERE}, was called under a Python dispatch mode.*{REMEDY}")


def case_a_call_in_a_selective_checkpoint_is_refused():
    is_refused(selective_checkpoint, rf"{WHERE}, was called under a Python dispatch mode.*{REMEDY}")


def case_a_call_under_a_function_mode_is_refused():
    is_refused(function_mode, r"call of 1, which lives on another rank, inside a torch function mode.*enter it around")


def case_a_second_order_gradient_is_refused():
    is_refused(second_order, rf"create_graph=True through {WHERE}, is not supported; place it on the caller's rank")


def case_calls_in_threads_of_the_bodys_own_are_refused():
    called, outside, code = "in a thread of its own", "called outside a step", r"\[step-outside\]"
    for part in (False, True):
        lamina.init(partitions=2)
        model = lamina.distribute(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)))

        @lamina.step
        def step(x, part):
            with ThreadPoolExecutor() as own:
                return own.submit(model.module[0] if part else model, x).result()  # noqa: B023 -- of this iteration

        with pytest.raises(lamina.UsageError, match=f"{called if part else outside}.*{code}"):
            step(BATCH, part)  # the first step
        lamina.step(lambda x: model(x))(BATCH)  # noqa: B023
        with pytest.raises(lamina.UsageError, match=f"{outside}.*{code}"):
            step(BATCH, False)
        lamina.shutdown()


def case_a_backward_that_microbatches_add_up_is_told_of_once():
    for partition in (0, 1):
        lamina.init(partitions=2, microbatches=2, auto_partition=False, default_partition=partition)
        model = lamina.distribute(nn.Linear(6, 1))

        @lamina.step
        def step(x):
            model(x).sum().backward()  # noqa: B023 -- called in this iteration

        with said_on_stderr() as said:
            step(BATCH)
            step(BATCH)
        assert said[0].count("a step has called loss.backward()") == (lamina.rank() == 0), said
        lamina.shutdown()
