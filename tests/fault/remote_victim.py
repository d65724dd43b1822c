# SPDX-License-Identifier: Apache-2.0
"""Trains a module of rank 0 until rank VICTIM dies in PLACE, forward or context: remote_victim.py VICTIM PLACE.

A trainer dies in its context, or while the owner runs its forward; the owner in a forward. Who lives on writes what it
has met: trainers an error, or that they made all their steps, the owner how many updates its parameter has had.
"""

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from victim import note, noted

import lamina
from lamina import remote

VICTIM, PLACE = int(sys.argv[1]), sys.argv[2]
STEPS, FATAL_STEP = 30, 5


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, trainer, step):
        if (trainer, step) == (2, FATAL_STEP) and PLACE == "forward":
            if VICTIM == 0:
                die()
            entered().touch()
            while not Path(os.environ["DIR"], "death.2").exists():
                time.sleep(0.01)
        return self.weight.sum()


def entered():
    return Path(os.environ["DIR"], "entered")


def die():
    note("death", "")
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_served():
    while not entered().exists():
        time.sleep(0.01)
    die()


def train():
    net = remote.find("net", owner=0)
    optimizer = lamina.optim.DistributedOptimizer(torch.optim.SGD, net.parameters(), lr=1.0)
    mine = lamina.rank() == VICTIM
    for step in itertools.count() if VICTIM == 0 else range(STEPS):
        if mine and step == FATAL_STEP and PLACE == "forward":
            threading.Thread(target=die_when_served).start()
        with remote.context() as context:
            loss = net(lamina.rank(), step)
            if mine and step == FATAL_STEP:
                die()
            remote.backward(context, loss)
            optimizer.step(context)
    note("done", str(STEPS))


def main():
    lamina.init(timeout_s=60)
    if lamina.rank() == 0:
        module = Weight()
        remote.place(module, name="net")
        remote.serve()
        server = lamina.job.current.session().parameter_server
        deadline = time.time() + 10
        while server.contexts and time.time() < deadline:
            time.sleep(0.01)
        note("served", f"{int(-module.weight[0].item())} updates, {server.contexts} contexts")
    else:
        train()
    lamina.shutdown()


if __name__ == "__main__":
    noted(main)
