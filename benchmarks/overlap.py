# SPDX-License-Identifier: Apache-2.0
"""Gathers of sharded values, and sums of gradients, beside modules that sleep: how much of them is hidden.

    lamina run -n 2 benchmarks/overlap.py

Two processors hide no copies behind computations, so the modules here sleep: one time in a forward, twice that in a
backward. Each has a parameter of 48 MiB. Ideally a forward of three waits for the first value alone and computes: `comm
+ 3 compute`, where `comm` is what a forward of one takes beside its sleep. An iteration then has `comm` once, too.
`of_ideal` is the median of the ratios to that; `lamina` is over shared memory, where nothing is gathered.
"""

import os
import statistics
import time

import torch
from measure import Report, arguments
from torch import nn

import lamina

ELEMENTS, COMPUTE_S = 12 << 20, 0.15


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(COMPUTE_S)
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * COMPUTE_S)
        (weight,) = ctx.saved_tensors
        return gradient, torch.empty_like(weight)


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slept.apply(x, self.weight)


def measured(backend: str, modules: int, count: int) -> tuple[float, float]:
    """Milliseconds of a forward and of a whole iteration, of a job with so many modules; medians."""
    lamina.init(ddp=True, sharded_data_parallel_degree=2, ddp_dist_backend=backend)
    net = lamina.distribute(nn.Sequential(*(Sleeper() for _ in range(modules))))
    x = torch.zeros(1, requires_grad=True)
    forwards, iterations = [], []
    for _ in range(count + 1):
        net.zero_grad()
        lamina.barrier()
        begin = time.perf_counter()
        out = net(x).sum()
        middle = time.perf_counter()
        out.backward()
        end = time.perf_counter()
        forwards.append(1e3 * (middle - begin))
        iterations.append(1e3 * (end - begin))
    lamina.shutdown()
    return statistics.median(forwards[1:]), statistics.median(iterations[1:])


def main() -> None:
    options = arguments(__doc__)
    report = Report(options.name or "overlap", "Three sharded modules that sleep, two ranks")
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    compute = 1e3 * COMPUTE_S
    for _ in range(options.pick(1, 3, 7)):
        for way, backend in (("over Gloo", "nccl"), ("lamina", "auto")):
            one, both = measured(backend, 1, 3)
            gather, total = one - compute, both - 3 * compute
            forward, iteration = measured(backend, 3, 3)
            figures.setdefault((way, "forward"), []).append((forward, gather + 3 * compute))
            figures.setdefault((way, "iteration"), []).append((iteration, total + 9 * compute))
    for (way, what), pairs in figures.items():
        ratio = statistics.median(own / ideal for own, ideal in pairs)
        report.add(what, way, "ms", [own for own, _ in pairs], of_ideal=ratio)
        report.add(what, f"{way}, ideal", "ms", [ideal for _, ideal in pairs])
    if os.environ.get("RANK", "0") == "0":
        report.finish()


if __name__ == "__main__":
    main()
