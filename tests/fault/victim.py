# SPDX-License-Identifier: Apache-2.0
"""Trains until one rank dies: victim.py RANK PLACE, with PLACE one of forward, backward, weights (the part of a
backward that is the parameters' in a schedule without bubbles), body, between.

The victim writes the time of its death; each survivor writes when its error came, and what it said.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from training import spread, train_step

import lamina

FATAL_STEP = 3


class Dies(nn.Module):
    """Ends its process in the given place of step `FATAL_STEP`."""

    step = 0

    def __init__(self, place):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place = place

    def forward(self, x):
        die_at("forward", self.place)
        y = self.linear(x)
        y.register_hook(lambda gradient: die_at("backward", self.place))
        self.linear.weight.register_hook(lambda gradient: die_at("weights", self.place))
        return y


def die_at(here, place):
    mine = lamina.rank() == int(sys.argv[1])
    if mine and here == place and Dies.step == FATAL_STEP:
        note("death", "")
        os.kill(os.getpid(), signal.SIGKILL)


def note(name, text):
    line = {"at": time.time(), "text": text}
    path = Path(os.environ["DIR"], f"{name}.{os.environ['RANK']}")
    unfinished = path.with_name(f"unfinished-{path.name}")
    unfinished.write_text(json.dumps(line))
    unfinished.rename(path)  # somebody may wait for it and read it at once


def noted(main):
    """Runs a program, and notes the error of lamina's that ends it."""
    try:
        main()
    except lamina.Error as error:
        note("error", f"{type(error).__name__}: {error}")
        raise


def main():
    place = sys.argv[2]
    lamina.init(
        partitions=int(os.environ["WORLD_SIZE"]),
        microbatches=4,
        auto_partition=False,
        default_partition=0,
        schedule="zero_bubble" if place == "weights" else "interleaved",
    )
    model = spread([Dies(place) for _ in range(2 * lamina.pp_size())], lamina.pp_size())
    train = train_step(model, lambda: die_at("body", place))

    for Dies.step in range(1000):
        train(torch.randn(8, 4, device=lamina.device()))
        die_at("between", place)
        model.zero_grad()


if __name__ == "__main__":
    noted(main)
