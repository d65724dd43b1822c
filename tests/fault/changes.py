# SPDX-License-Identifier: Apache-2.0
"""Changes the layout of a job of three ranks, one of which dies in it: changes.py RANK PLACE, with PLACE one of
listing, between, meeting, ending, cutting, or loading.

The victim writes the time of its death; each survivor writes when its error came, and what it said.
"""

import os
import signal
import sys

import torch
from torch import nn
from victim import note, noted

import lamina
from lamina.elastic import change
from lamina.job import current
from lamina.pipeline.model_face import ModelFace

VICTIM, PLACE = int(sys.argv[1]), sys.argv[2]


def dies_before(function):
    def dying(*args, **kwargs):
        if int(os.environ["RANK"]) == VICTIM:
            note("death", "")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return dying


def main():
    lamina.init(partitions=3, ddp=True, microbatches=3, timeout_s=30)
    torch.manual_seed(0)
    model = lamina.distribute(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(torch.ones(6, 16))
    optimizer.step()
    optimizer.zero_grad()
    if PLACE == "listing":
        change.MovingJob.tensors = dies_before(change.MovingJob.tensors)
    elif PLACE == "between":
        change.everywhere = dies_before(change.everywhere)
    elif PLACE == "meeting":
        change._go_over = dies_before(change._go_over)
    elif PLACE == "ending":
        current.end = dies_before(current.end)
    elif PLACE == "cutting":
        ModelFace.take_cut = dies_before(ModelFace.take_cut)
    elif PLACE == "loading":
        ModelFace.load = dies_before(ModelFace.load)
    lamina.change(partitions=1)


if __name__ == "__main__":
    noted(main)
    sys.exit(1)
