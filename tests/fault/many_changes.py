# SPDX-License-Identifier: Apache-2.0
"""Changes the layout of a job between partitions and copies: many_changes.py WARM COUNT, times there and back. It
writes of each rank how many KiB it has more after COUNT than after WARM, and both times its open files and the keys in
the job's store."""

import gc
import os
import sys

import torch
from torch import distributed as dist
from torch import nn

import lamina

WARM, COUNT = map(int, sys.argv[1:])


def taken():
    gc.collect()
    with open("/proc/self/statm") as file:
        kib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    keys = len(store.list_keys())
    del store
    return kib, len(os.listdir("/proc/self/fd")), keys


def main():
    lamina.init(ddp=True, microbatches=2)
    torch.manual_seed(0)
    model = lamina.distribute(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def change(partitions):
        optimizer.zero_grad()
        step(torch.ones(4, 8))
        optimizer.step()
        optimizer.zero_grad()
        lamina.change(partitions=partitions, microbatches=2)

    for number in range(2 * WARM):
        change(2 - number % 2)
    before = taken()
    for number in range(2 * COUNT):
        change(2 - number % 2)
    after = taken()
    for grown in lamina.allgather((after[0] - before[0], before[1:], after[1:]), lamina.WORLD):
        print("grown:", *grown)


main()
