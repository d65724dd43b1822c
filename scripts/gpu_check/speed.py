# SPDX-License-Identifier: Apache-2.0
"""Measures what lamina adds on one accelerator: an update of AdamW beside torch's fused one, a step beside a plain one.
Times are the device's, by its events; medians. What is promised is promised of GPUs: on another device, which may be
slow, all is a quarter as wide, and only told of."""

import statistics
import sys
import time

import device
import torch
import training

import lamina

ROUNDS = 50
LONGEST_S = 5
MOST = {"AdamW": 1.05, "a step": 1.1}


def median_ms(here, work):
    for _ in range(3):
        work()
    took, last = [], time.monotonic() + LONGEST_S
    while len(took) < ROUNDS and (not took or time.monotonic() < last):
        begin, end = (torch.Event(here, enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took)


def narrow(here, width):
    return width if here.type == "cuda" else width // 4


def updates(here):
    """25 matrices of 1024 x 1024."""
    width = narrow(here, 1024)

    def made(kind, **arguments):
        parameters = [torch.zeros(width, width, device=here, requires_grad=True) for _ in range(25)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return kind(parameters, lr=1e-3, **arguments).step

    return median_ms(here, made(lamina.optim.AdamW)), median_ms(here, made(torch.optim.AdamW, fused=True))


def steps(here):
    """A GPT of 8 blocks of 512, 2,048 tokens a step."""
    size = dict(width=narrow(here, 512), depth=8, heads=8, context=256)
    generator = torch.Generator().manual_seed(7)
    batch = [each.to(here) for each in training.GPT.batch(generator, torch.float32, samples=8, context=256)]
    alone = training.made(training.GPT, **size).to(here)
    optimizer = lamina.optim.AdamW(alone.parameters())

    def plain():
        optimizer.zero_grad()
        alone(*batch).backward()
        optimizer.step()

    theirs = median_ms(here, plain)
    with training.Job(training.made(training.GPT, **size), lamina.optim.AdamW) as job:
        return median_ms(here, lambda: job.step(batch)), theirs


def main():
    here, problems = device.find(), []
    for name, times in {"AdamW": updates(here), "a step": steps(here)}.items():
        ours, theirs = times
        print(f"{name}: {ours:.3f} ms, torch's {theirs:.3f}, {ours / theirs:.2f} of it", flush=True)
        if here.type == "cuda" and ours > MOST[name] * theirs:
            problems.append(f"{name} takes {ours / theirs:.2f} of torch's time, {MOST[name]} is the most")
    return training.told(problems)


if __name__ == "__main__":
    sys.exit(main())
