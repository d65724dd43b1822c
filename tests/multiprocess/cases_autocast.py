# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks that are one pipeline under autocast. Each begins without a job."""

import torch
import torch.nn.functional as F
from torch import nn

import lamina

ROWS, MICROBATCHES = 2, 3


class Twice(nn.Module):
    """Uses its weight before and after a call of `far`: with no graph the first time, where `fixed` says so."""

    def __init__(self, fixed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.far = nn.Linear(8, 8)
        self.fixed = fixed

    def forward(self, x, row):
        with torch.set_grad_enabled(row not in self.fixed):
            y = F.linear(x, self.weight)
        far = self.far(x)
        far.sum().item()  # another microbatch computes meanwhile
        return F.linear(far + y, self.weight).float()


def gradients(fixed=(), **how):
    """Gradients of the weight under autocast set like that, and what a plain loop that keeps no cast finds."""
    torch.manual_seed(0)
    model = Twice(fixed)
    x = torch.randn(ROWS * MICROBATCHES, 8)
    rows = torch.arange(MICROBATCHES).repeat_interleave(ROWS)
    plain = Twice(fixed)
    plain.load_state_dict(model.state_dict())
    for part, row in zip(x.chunk(MICROBATCHES), rows.chunk(MICROBATCHES), strict=True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = plain(part, row[0].item()).square().sum()
        (loss / MICROBATCHES).backward()

    lamina.init(
        partitions=2,
        microbatches=MICROBATCHES,
        auto_partition=False,
        default_partition=0,
        deterministic_server=True,
        timeout_s=30,
    )
    lamina.set_partition(model.far, 1)
    model = lamina.distribute(model)

    @lamina.step
    def step(x, rows):
        with torch.autocast("cpu", torch.bfloat16, **how):
            loss = model(x, rows[0].item()).square().sum()
        model.backward(loss)
        return loss

    step(x, rows)
    return (model.module.weight.grad if lamina.pp_rank() == 0 else plain.weight.grad), plain.weight.grad


def case_a_weight_that_is_cast_twice_has_the_gradient_of_two_casts():
    """Torch keeps casts once per process: which of them a microbatch found depended on what the others did."""
    here, there = gradients()
    assert torch.equal(here, there), (here - there).abs().max()


def case_a_cast_without_a_graph_in_one_microbatch_is_not_used_in_another():
    for how in ({}, {"cache_enabled": True}):
        here, there = gradients(fixed=(0,), **how)
        assert torch.equal(here, there), (here - there).abs().max()
        lamina.shutdown()
