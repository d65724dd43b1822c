# SPDX-License-Identifier: Apache-2.0
"""Cases of backwards in two parts, for two ranks that are one pipeline. Each begins without a job."""

import gc
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


class Kept:
    """An object that a graph keeps."""


def kept() -> int:
    """How many of them there are."""
    gc.collect()
    return sum(type(each) is Kept for each in gc.get_objects())


class Scale(torch.autograd.Function):
    """Counts its backwards, and has its graphs keep something."""

    backwards = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.kept = Kept()
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        Scale.backwards += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Block(nn.Module):
    """Uses weights twice, a function of its own, and both kinds of checkpoints."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.reentrant = reentrant

    def inner(self, x):
        return Scale.apply(F.gelu(self.second(self.first(x))), self.scale)

    def forward(self, x):
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = checkpoint(self.inner, self.norm(x), use_reentrant=self.reentrant)
        return Scale.apply(self.first(y), self.scale) + x


class Net(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(4))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[0].first.weight
        for at, block in enumerate(self.blocks):
            lamina.set_partition(block, at % 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(make=Net):
    torch.manual_seed(0)
    return make()


def start(schedule="zero_bubble", **keys):
    lamina.init(
        **(
            {"partitions": 2, "microbatches": 8, "timeout_s": 30, "auto_partition": False, "default_partition": 0}
            | {"schedule": schedule}
            | keys
        )
    )


def train_step(model):
    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return step


def gradients(model):
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def trained(schedule, make=Net, steps=3, **keys):
    """Gradients of this rank's part, summed over steps."""
    start(schedule, **keys)
    model = lamina.distribute(build(make))
    step = train_step(model)
    for _ in range(steps):
        step(BATCH)
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    lamina.shutdown()
    return found


def case_it_trains_like_the_plain_loop_with_checkpoints_of_both_kinds():
    for reentrant in (False, True):
        plain = build(lambda r=reentrant: Net(r))
        plain(BATCH).square().mean().backward()
        for name, gradient in trained("zero_bubble", lambda r=reentrant: Net(r), steps=1).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def case_a_function_of_the_scripts_own_runs_once_and_nothing_is_kept_after_steps():
    start()
    model = lamina.distribute(build())
    step = train_step(model)
    for _ in range(30):
        Scale.backwards = 0
        step(BATCH)
        assert Scale.backwards == 2 * 2 * 8  # by this rank's blocks, in each microbatch
        assert kept() == 0
        model.zero_grad()


def case_a_deterministic_job_has_the_bits_of_interleaved():
    whole = trained("interleaved", deterministic_server=True)
    for _ in range(3):
        split = trained("zero_bubble", deterministic_server=True)
        assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


def case_gradients_are_there_when_the_backward_of_a_body_has_returned():
    start(microbatches=1)
    model = lamina.distribute(build())

    @lamina.step
    def step(x):
        model.backward(model(x).square().mean())
        assert all(gradient is not None for gradient in gradients(model).values())

    for _ in range(3):
        step(BATCH)
        model.zero_grad()


def case_a_weight_part_that_fails_keeps_its_error_on_every_rank_and_the_next_step_is_right():
    plain = build()
    plain(BATCH).square().mean().backward()
    for rank in (0, 1):
        start()
        model = lamina.distribute(build())
        step = train_step(model)
        step(BATCH)
        if rank == RANK:

            def fail(gradient):
                raise KeyError("failed on purpose")

            hook = model.get_parameter(f"blocks.{rank}.second.weight").register_hook(fail)
        with pytest.raises(KeyError, match="failed on purpose"):
            step(BATCH)
        if rank == RANK:
            hook.remove()
        assert kept() == 0
        model.zero_grad()
        step(BATCH)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        lamina.shutdown()


def case_two_models_that_a_body_trains_one_after_the_other_have_their_gradients():
    """The second backward begins when the weight part of the first one has run."""
    start(microbatches=4)
    model = lamina.distribute(build())

    @lamina.step
    def step(x):
        model.backward(model(x).square().mean())
        model.backward(model(x).sum())

    step(BATCH)
    plain = build()
    plain(BATCH).square().mean().backward()
    (sum(plain(part).sum() for part in BATCH.chunk(4)) / 4).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def case_one_partition_says_that_it_changes_nothing():
    with pytest.warns(UserWarning, match='schedule: "zero_bubble" changes nothing with one partition'):
        lamina.init(schedule="zero_bubble", microbatches=2)
    model = lamina.distribute(nn.Linear(6, 6))
    train_step(model)(BATCH)
    assert model.weight.grad is not None
