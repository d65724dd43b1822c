# SPDX-License-Identifier: Apache-2.0
"""The step of lamina that the benchmarks of the demo's model take, and its time."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

import lamina


def lamina_step(model, optimizer) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Forward, backward and update, which every rank calls; gives the losses of the microbatches."""

    @lamina.step
    def forward_and_backward(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    return with_update(forward_and_backward, optimizer)


def with_update(forward_and_backward: Callable, optimizer) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """A step function, and the update after it."""

    def step(x, y):
        losses = forward_and_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def measured(
    step: Callable, batch: Iterable[torch.Tensor], around: AbstractContextManager | None = None
) -> tuple[float, float]:
    """Wall milliseconds on this rank and processor milliseconds of all, of one step inside `around`."""
    dist.barrier()
    with around or nullcontext():
        begin, begin_cpu = time.perf_counter(), time.process_time()
        step(*batch)
        wall, cpu = time.perf_counter() - begin, torch.tensor(time.process_time() - begin_cpu)
    dist.all_reduce(cpu)
    return 1e3 * wall, 1e3 * cpu.item()
