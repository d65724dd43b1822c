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
from training import train_step
from victim import note

import lamina
from lamina.data_parallel.replicas import Replicas

FATAL_PASS = 3
passes = 0
own = Replicas._own


def fail_before_the_third(replicas, names):
    global passes
    passes += names == "named_parameters"
    if passes == FATAL_PASS and lamina.rank() == int(sys.argv[1]):
        note("death", "")
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    if passes == FATAL_PASS:
        note("waits", "")
    return own(replicas, names)


def main():
    Replicas._own = fail_before_the_third
    lamina.init(partitions=int(sys.argv[3]), ddp=True, timeout_s=float(sys.argv[4]))
    model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    train = train_step(model)

    for _ in range(1000):
        train(torch.randn(8, 4))


if __name__ == "__main__":
    try:
        main()
    except lamina.Error as error:
        note("error", f"{type(error).__name__}: {error}")
        raise
