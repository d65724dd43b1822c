# SPDX-License-Identifier: Apache-2.0
"""other_members.py VICTIM PORT: three processes train copies of a model, of which one is killed in a step.

The others go on as ranks of the next epoch, with a process that was started for it (LAMINA_EPOCH is 1). Each of these
writes the weights at the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import lamina

VICTIM, PORT = int(sys.argv[1]), sys.argv[2]
STEPS, FATAL = 6, 3


def batch(step):
    """Three rows, one for each rank."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def update(model, rows):
    loss = model(rows).square().mean()
    model.backward(loss) if isinstance(model, lamina.DistributedModel) else loss.backward()


def train(weights, steps, fatal=None):
    """Goes on from the weights, which change when a step has ended."""
    lamina.init(ddp=True, timeout_s=30)
    module = nn.Linear(4, 4).double()
    module.load_state_dict(weights)
    model = lamina.distribute(module)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @lamina.step
    def step(rows):
        update(model, rows)

    for number in steps:
        optimizer.zero_grad()
        if number == fatal and lamina.rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        step(batch(number)[lamina.rank() :][:1])
        optimizer.step()
        weights.update({name: value.clone() for name, value in module.state_dict().items()})


def main():
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in nn.Linear(4, 4).double().state_dict().items()}
    comes_later = os.environ.get("LAMINA_EPOCH") == "1"
    if not comes_later:
        try:
            train(weights, range(STEPS), FATAL)
        except lamina.PeerError:
            lamina.shutdown()
            rank = int(os.environ["RANK"])
            os.environ |= {"RANK": str(rank - (rank > VICTIM)), "LAMINA_EPOCH": "1", "MASTER_PORT": PORT}
            os.environ |= {"LOCAL_RANK": os.environ["RANK"]}
    train(weights, range(FATAL, STEPS))
    torch.save(weights, Path(os.environ["DIR"], f"weights.{lamina.rank()}"))
    lamina.shutdown()


if __name__ == "__main__":
    main()
