# SPDX-License-Identifier: Apache-2.0
"""Trains on emulated accelerators until a kernel of rank 1 fails: failing_kernel.py PLACE [caught].

PLACE is "forward" or "backward", of a module on rank 1; "loop", of a copy of the model; or "sent", of a value that
another rank waits for. With "caught" rank 1 goes on after the error, to the end of its program. Each rank writes its
error to $DIR/error.RANK.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "build/emulated"))

import emulated  # noqa: F401 -- makes the devices known to torch
import torch
from torch import nn

import lamina

PLACE, FAILS = sys.argv[1], 1
FATAL_STEP = 2


def broken(x):
    """`x`, after a kernel that fails: the host goes on."""
    return x + x.new_ones(4).index_select(0, torch.tensor([9], device=x.device))


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return broken(gradient)


class Layer(nn.Linear):
    step = 0

    def forward(self, x):
        y = super().forward(x)
        if Layer.step == FATAL_STEP and lamina.rank() == FAILS:
            y = broken(y) if PLACE in ("forward", "loop") else y
            y = Breaks.apply(y) if PLACE == "backward" else y
        return y


def pipeline():
    lamina.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0, timeout_s=60)
    layers = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
    lamina.set_partition(layers[1], 1)
    model = lamina.DistributedModel(layers)

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return lambda: step(torch.ones(4, 4, device=lamina.device()))


def copies():
    lamina.init(ddp=True, timeout_s=60)
    model = lamina.DistributedModel(nn.Sequential(Layer(4, 4), Layer(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 4, device=lamina.device())).square().mean().backward()
        optimizer.step()

    return step


def messages():
    lamina.init(timeout_s=60)

    def step():
        if lamina.rank() == FAILS:
            x = torch.ones(4, device=lamina.device())
            lamina.send(broken(x) if Layer.step == FATAL_STEP else x, 0, lamina.RankType.WORLD_RANK)
            lamina.recv_from(0, lamina.RankType.WORLD_RANK)
        else:
            lamina.recv_from(1, lamina.RankType.WORLD_RANK)
            lamina.send(None, 1, lamina.RankType.WORLD_RANK)

    return step


def main():
    step = {"loop": copies, "sent": messages}.get(PLACE, pipeline)()
    try:
        for Layer.step in range(10):
            step()
    except BaseException as error:
        (Path(os.environ["DIR"]) / f"error.{lamina.rank()}").write_text(f"{type(error).__name__}: {error}")
        if "caught" not in sys.argv or lamina.rank() != FAILS:
            raise


if __name__ == "__main__":
    main()
