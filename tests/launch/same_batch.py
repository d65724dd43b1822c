# SPDX-License-Identifier: Apache-2.0
"""same_batch.py HOW: two copies of a model, each with its partition on one rank, train two steps on "same" batches, on
"own" ones, or on what rank 0 has "sent"; the first has evaluated alone."""

import sys

import torch
from torch import nn

import lamina

HOW = sys.argv[1]


def main():
    lamina.init(ddp=True, microbatches=2)
    model = lamina.distribute(nn.Linear(4, 4))

    @lamina.step
    def train(x):
        model.backward(model(x).sum())

    if lamina.dp_rank() == 0:
        with torch.no_grad():
            model(torch.ones(1, 4))
    for step in range(2):
        x = torch.full((4, 4), float(step + (lamina.dp_rank() if HOW == "own" else 0)))
        if HOW == "sent" and lamina.rank() == 0:
            lamina.broadcast(x, lamina.WORLD)
        elif HOW == "sent":
            x = lamina.recv_from(0, lamina.RankType.WORLD_RANK)
        train(x)


if __name__ == "__main__":
    main()
