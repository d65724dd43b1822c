# SPDX-License-Identifier: Apache-2.0
"""Replicas train until one dies or stops, right before gradients are averaged: when the engine asks for its parameters.

replica.py RANK HOW PARTITIONS TIMEOUT_S, with HOW one of killed, silent. Times and errors are noted as in victim.py.
"""

import os
import signal
import sys
import threading

import torch
from torch import nn
from training import call_before_reductions, train_step
from victim import note, noted

import lamina

FATAL_PASS = 3
passes = 0


def fail_before_the_third():
    global passes
    passes += 1
    if passes == FATAL_PASS and lamina.rank() == int(sys.argv[1]):
        note("death", "")
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    if passes == FATAL_PASS:
        note("waits", "")


def main():
    call_before_reductions(fail_before_the_third)
    lamina.init(partitions=int(sys.argv[3]), ddp=True, timeout_s=float(sys.argv[4]))
    model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    train = train_step(model)

    for _ in range(1000):
        train(torch.randn(8, 4, device=lamina.device()))


if __name__ == "__main__":
    noted(main)
