# SPDX-License-Identifier: Apache-2.0
"""Trains a small model of a text's bytes without waiting for each other: the last rank owns the model, all others train
it. Each trainer's update is applied as it comes; in the next call it sees those of the others.

    lamina run -n 4 examples/parameter_server.py --steps 300

Rank 0 is a trainer, and shows its loss; at the end the loss on text that no trainer has seen.
"""

import argparse

import torch
from text import VOCABULARY, Batches, standard_library
from torch import nn
from torch.nn import functional as F

import lamina
from lamina import remote

CONTEXT, BATCH = 8, 64


class Net(nn.Module):
    """Says which byte comes after `CONTEXT` others."""

    def __init__(self, width: int = 32, hidden: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(CONTEXT * width, hidden)
        self.output = nn.Linear(hidden, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.hidden(self.embedding(x).flatten(1)).relu())


def loss_of(net: remote.RemoteModule, batches: Batches) -> torch.Tensor:
    """The mean loss over some windows of a text."""
    x_BC, y_BC = batches.next()
    return F.cross_entropy(net(x_BC), y_BC[:, -1])


def train(net: remote.RemoteModule, steps: int) -> float:
    """Returns the loss at the end, on text that is not trained on."""
    training, validation = (
        Batches(text, sequences=BATCH, context=CONTEXT, seed=lamina.rank()) for text in standard_library()
    )
    optimizer = lamina.optim.DistributedOptimizer(torch.optim.AdamW, net.parameters(), lr=2e-3)
    for step in range(steps):
        with remote.context() as context:
            loss = loss_of(net, training)
            remote.backward(context, loss)
            optimizer.step(context)
        if lamina.rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        return torch.stack([loss_of(net, validation) for _ in range(20)]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each trainer")
    options = parser.parse_args()
    lamina.init()
    owner = lamina.size() - 1
    if lamina.rank() == owner:
        remote.place(Net(), name="net")
        remote.serve()
    else:
        loss = train(remote.find("net", owner), options.steps)
        if lamina.rank() == 0:
            print(f"loss on other text: {loss:.3f}", flush=True)
    lamina.shutdown()


if __name__ == "__main__":
    main()
