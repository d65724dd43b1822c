# SPDX-License-Identifier: Apache-2.0
"""Values that arrive on a rank without room for them, of two ranks that are one pipeline."""

import gc
import os

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import RemoteError

MIB = 1 << 20
WIDTH = 256


def filled(left):
    """Memory of this rank's device: all but so many MiB, and what cases before it have left there."""
    size = int(os.environ["EMULATED_MEMORY"]) - torch.accelerator.memory_allocated() - int(left * MIB)
    return torch.empty(size, dtype=torch.uint8, device=lamina.device())


def spread():
    gc.collect()  # what the case before has left
    lamina.init(partitions=2, auto_partition=False, default_partition=0, timeout_s=60)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False))
    lamina.set_partition(layers[1], 1)
    return lamina.DistributedModel(layers)


def run(model, rows):
    @lamina.step
    def step(x):
        y = model(x)
        model.backward(y.sum())
        return y.detach()

    return step(torch.ones(rows, WIDTH, device=lamina.device()) if lamina.rank() == 0 else None)


def expect_full_on(rank, call):
    """All ranks meet the error of that rank."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    if isinstance(caught.value, RemoteError):  # it may come back to the rank that it is of
        assert caught.value.rank == rank
    text = str(caught.value)
    assert text.startswith("emulated out of memory. Tried to allocate "), text
    assert f"rank {rank} of 2: the memory of emulated:{rank} was full" in text, text


def after_no_room(rank, left, rows):
    """The model, after a step of so many rows for which the device of `rank` had but so many MiB left."""
    model = spread()
    run(model, rows=2)
    held = filled(left) if lamina.rank() == rank else None
    expect_full_on(rank, lambda: run(model, rows))
    del held
    return model


def case_arguments_of_a_call_find_no_room():
    model = after_no_room(rank=1, left=0.6, rows=1024)
    assert run(model, rows=2).concat().isfinite().all().item()


def case_a_module_of_another_rank_finds_no_room():
    after_no_room(rank=1, left=2.5, rows=1024)


def case_results_of_a_call_find_no_room():
    after_no_room(rank=0, left=1, rows=256)


def case_a_value_that_was_sent_finds_no_room():
    gc.collect()
    lamina.init(timeout_s=60)
    held = filled(1) if lamina.rank() == 1 else None
    lamina.barrier()  # until then the value would find room where it arrives
    if lamina.rank() == 0:
        lamina.send(torch.ones(MIB // 2, device=lamina.device()), 1, lamina.RankType.WORLD_RANK)
    else:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 MiB"):
            lamina.recv_from(0, lamina.RankType.WORLD_RANK)
    del held
    lamina.barrier()
