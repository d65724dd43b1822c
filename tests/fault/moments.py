# SPDX-License-Identifier: Apache-2.0
"""Trains until one rank is killed within a phase: moments.py RANK PHASE FRACTION PARTITIONS.

PHASE is one of forward, backward, reduction, between; FRACTION says at which part of the time that the phase took in
the step before. Times and errors are noted as in victim.py.
"""

import os
import signal
import sys
import threading
import time

import torch
from torch import nn
from training import call_before_reductions, spread, train_step
from victim import note, noted

import lamina

VICTIM, PHASE, FRACTION, PARTITIONS = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
FATAL_STEP = 3
MICROBATCHES = 4
LAYERS = 2 * PARTITIONS


class Phases:
    """Where this rank is in a step; ends the process in the phase asked for, at its end at the latest. Each rank has
    its own, as of an object of a library's."""

    __module__ = "torch"

    def __init__(self):
        self.step = 0
        self.began = {}
        self.took = {}
        self.calls = {}

    def begin(self, phase):
        self.began[phase] = time.monotonic()
        if self.is_fatal(phase):
            threading.Timer(FRACTION * self.took[phase], die).start()

    def end(self, phase):
        if self.is_fatal(phase):
            die()
        self.took[phase] = time.monotonic() - self.began[phase]

    def is_fatal(self, phase):
        return self.step == FATAL_STEP and phase == PHASE and lamina.rank() == VICTIM

    def call(self, phase, work):
        """One of the calls of a layer of this rank, which together are the phase."""
        count = self.calls[phase] = self.calls.get(phase, 0) + 1
        calls = MICROBATCHES * LAYERS // PARTITIONS
        if count % calls == 1:
            self.begin(phase)
        result = work()
        if count % calls == 0:
            self.end(phase)
        return result


phases = Phases()
lock = threading.Lock()


def die():
    lock.acquire()  # for good: whoever is second waits for its end
    note("death", "")
    os.kill(os.getpid(), signal.SIGKILL)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return phases.call("backward", lambda: 2 * gradient)


class Layer(nn.Linear):
    def forward(self, x):
        return phases.call("forward", lambda: Twice.apply(super(Layer, self).forward(x)).tanh())


def main():
    call_before_reductions(lambda: phases.begin("reduction"))
    lamina.init(partitions=PARTITIONS, microbatches=MICROBATCHES, ddp=True, auto_partition=False, default_partition=0)
    model = spread([Layer(128, 128) for _ in range(LAYERS)], PARTITIONS)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train = train_step(model)

    for phases.step in range(1000):
        phases.calls.clear()  # the trace of the model calls layers too
        train(torch.randn(32, 128, device=lamina.device()))
        if "reduction" in phases.began:
            phases.end("reduction")
        phases.begin("between")
        optimizer.step()
        optimizer.zero_grad()
        phases.end("between")


if __name__ == "__main__":
    noted(main)
