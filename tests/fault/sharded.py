# SPDX-License-Identifier: Apache-2.0
"""Trains a sharded model until one rank is killed, or stopped, within an iteration.

sharded.py RANK HOW FRACTION DEGREE BACKEND TIMEOUT_S, with HOW one of killed, stopped; FRACTION says at which part of
the time that the iteration before took. BACKEND is a `ddp_dist_backend`, or `machines`: `auto` on pretended machines of
two ranks, between which puts cross. Times and errors are noted as in victim.py.
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
    if backend == "machines":
        pretend_machines(2)
        backend = "auto"
    lamina.init(
        ddp=True,
        sharded_data_parallel_degree=int(sys.argv[4]),
        sdp_param_persistence_threshold=20,
        ddp_dist_backend=backend,
        timeout_s=float(sys.argv[6]),
    )
    model = lamina.distribute(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    took = 0.0
    for number in range(1000):
        if number == FATAL and lamina.rank() == VICTIM:
            threading.Timer(FRACTION * took, die).start()
        begin = time.monotonic()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took = time.monotonic() - begin


if __name__ == "__main__":
    noted(main)
