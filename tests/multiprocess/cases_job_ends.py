# SPDX-License-Identifier: Apache-2.0
"""Ends of jobs: nothing of one stays in the process, though the script still refers to all of it. Each case begins
without a job; two ranks run it."""

import gc
import os
import weakref
from pathlib import Path

import torch
from torch import nn

import lamina

WIDTH = 512
LAYER_MIB = 4 * WIDTH * WIDTH // 2**20


def taken():
    """Threads of this process, its descriptors, and the MiB that it shares with others."""
    lines = Path("/proc/self/status").read_text().splitlines()
    shared = next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))
    return {"threads": set(os.listdir("/proc/self/task")), "descriptors": descriptors(), "shared_mib": shared // 1024}


def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # of the folder itself
            continue
    return found


def leaves_nothing(**keys):
    for _ in range(2):  # torch and UCX keep something from the first use on
        before = taken()
        lamina.init(timeout_s=30, **keys)
        model = lamina.distribute(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))))
        optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @lamina.step
        def train(x, model=model):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train(torch.randn(4, WIDTH))
        optimizer.step()
        kept = (model, optimizer, train)
        lamina.shutdown()
        after = taken()
    assert kept
    assert not after["threads"] - before["threads"]
    more = {name: what for name, what in after["descriptors"].items() if name not in before["descriptors"]}
    assert len(more) <= 1, more
    assert after["shared_mib"] <= before["shared_mib"] + LAYER_MIB
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer, train, kept
    gc.collect()
    assert not [parameter for parameter in parameters if parameter() is not None]


def case_replicas_leave_nothing():
    leaves_nothing(ddp=True)


def case_a_sharded_job_leaves_nothing():
    leaves_nothing(ddp=True, sharded_data_parallel_degree=2)


def case_a_pipeline_leaves_nothing():
    leaves_nothing(partitions=2)


def case_a_pipeline_with_process_groups_leaves_nothing():
    leaves_nothing(partitions=2, ddp=True)
