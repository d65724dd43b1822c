# SPDX-License-Identifier: Apache-2.0
"""Trains a sharded model until one rank is killed, or stopped, within an iteration.

sharded.py RANK HOW FRACTION DEGREE BACKEND TIMEOUT_S [CODE], with HOW one of killed, stopped; FRACTION says at which
part of the time that the iteration before took; before it begins, where it is negative. BACKEND is a
`ddp_dist_backend`, or `machines`: `auto` on pretended machines of two ranks, between which puts cross, or `pipeline`:
`nccl` with two partitions. Times and errors are noted as in victim.py. With a CODE the script catches errors, and exits
with it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from victim import note, noted

sys.path.insert(0, str(Path(__file__).parents[1]))
from pretended_machines import pretend_machines

import lamina

VICTIM, HOW, FRACTION = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
FATAL = 4


def die():
    note("death", "")
    os.kill(os.getpid(), signal.SIGKILL if HOW == "killed" else signal.SIGSTOP)


def main():
    backend = sys.argv[5]
    partitions = 2 if backend == "pipeline" else 1
    if backend == "machines":
        pretend_machines(2)
    lamina.init(
        ddp=True,
        sharded_data_parallel_degree=int(sys.argv[4]),
        sdp_param_persistence_threshold=20,
        ddp_dist_backend={"machines": "auto", "pipeline": "nccl"}.get(backend, backend),
        partitions=partitions,
        microbatches=2 * partitions,
        timeout_s=float(sys.argv[6]),
    )
    model = lamina.distribute(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))

    @lamina.step
    def train(batch):
        model.backward(model(batch).square().mean())

    def plain(batch):
        model(batch).square().mean().backward()

    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    took = 0.0
    for number in range(1000):
        if number == FATAL and lamina.rank() == VICTIM:
            if FRACTION < 0:
                die()
            threading.Timer(FRACTION * took, die).start()
        begin = time.monotonic()
        (train if partitions > 1 else plain)(torch.randn(8, 64))
        optimizer.step()
        optimizer.zero_grad()
        took = time.monotonic() - begin


if __name__ == "__main__":
    try:
        noted(main)
    except lamina.Error:
        if len(sys.argv) < 8:
            raise
        sys.exit(int(sys.argv[7]))
