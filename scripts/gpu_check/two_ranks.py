# SPDX-License-Identifier: Apache-2.0
"""Two ranks, which may share one accelerator, by the checks below: two_ranks.py copies shards slices"""

import sys
import time

import device
import torch
import training
from torch import nn

import lamina

HERE = device.find()
MIB = 64  # of a large value
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def as_plain(name, *models, **more):
    for model in models:
        yield from training.against_plain(name, model, torch.float64, 1e-9, **training.LAYOUTS[name] | more)


@check
def copies():
    return as_plain("copies", training.MLP, training.GPT)


@check
def shards():
    return as_plain("shards", training.MLP, training.GPT)


@check
def slices():
    return as_plain("slices", training.MLP, training.GPT)


@check
def clipping():
    for name in ("copies", "shards", "slices", "a pipeline"):
        yield from as_plain(name, training.MLP, most=0.1)


@check
def pipeline():
    yield from as_plain("a pipeline", training.GPT, training.MLP)
    yield from as_plain("a pipeline", training.CNN, microbatches=1)  # whose BatchNorms see all of a batch
    yield from as_plain("a pipeline", training.GPT, schedule="simple")


@check
def small():
    """Little work, for a tool that slows everything down."""
    yield from as_plain("copies", training.MLP)
    yield from as_plain("a pipeline", training.MLP)


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


class Writes(nn.Module):
    """Writes to what it has sent, and to what it has got, right after the call."""

    def __init__(self):
        super().__init__()
        self.scale, self.there = nn.Parameter(torch.ones(())), Doubles()

    def forward(self, x):
        sent = x * self.scale.detach()
        got = self.there(sent)
        sent.fill_(-1)
        kept = got.clone()
        got.zero_()
        return (kept * self.scale).sum()


@check
def writes():
    """Values that travel are as they were when the call was made."""
    lamina.init(partitions=2, microbatches=4, timeout_s=60)
    model = Writes()
    lamina.set_partition(model.there, 1)
    lamina.set_partition(model, 0)
    model, batch = lamina.distribute(model), torch.arange(4 << 16, dtype=torch.float64, device=lamina.device())
    expected = [2 * each.sum().item() for each in batch.chunk(4)]
    for _ in range(20):
        found = [loss.item() for loss in training.train(model, batch).outputs]
        if found != expected:
            yield f"sums of what was sent are {found}, not {expected}"
            break
    lamina.shutdown()


class Far(nn.Module):
    """Takes a value to the other rank, and has it back."""

    def __init__(self):
        super().__init__()
        self.scale, self.there = nn.Parameter(torch.ones(())), Doubles()

    def forward(self, x):
        return self.there(x * self.scale).sum()


@check
def large():
    """Large values arrive whole; tells at what rate they travel."""
    lamina.init(partitions=2, timeout_s=60)
    model = Far()
    lamina.set_partition(model.there, 1)
    lamina.set_partition(model, 0)
    model, value = lamina.distribute(model), torch.ones(MIB << 18, device=lamina.device())
    took = []
    for _ in range(5):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        loss = training.train(model, value).reduce_mean().item()
        took.append(time.perf_counter() - begin)
        if loss != 2 * value.numel():
            yield f"the sum of {MIB} MiB is {loss}"
    lamina.shutdown()
    print(f"{MIB} MiB there, back, and their gradients: {4 * (MIB << 20) / min(took) / 1e9:.2f} GB/s", flush=True)


def main(names):
    return training.told(line for name in names for line in CHECKS[name]())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
