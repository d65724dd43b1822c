# SPDX-License-Identifier: Apache-2.0
"""The time that lamina adds to a call of a module that lives on the calling rank.

    python benchmarks/local_call.py

The modules return their argument. A sample is the mean of a block of calls, in turns with the same block before there
was a step, when nn.Module.__call__ was torch's.
"""

import time

import torch
from measure import Report, arguments
from torch import nn

import lamina


class Anything(nn.Module):
    """Nobody knows whether it draws random numbers, so it has a stream of its own."""

    def forward(self, x):
        return x


class Both(nn.Module):
    """The measured module, called from inside a model as it would be in training."""

    def __init__(self):
        super().__init__()
        self.draws_nothing = nn.Identity()
        self.may_draw = Anything()

    def forward(self, name, x, count):
        module = getattr(self, name)
        begin = time.perf_counter()
        for _ in range(count):
            module(x)
        return 1e6 * (time.perf_counter() - begin) / count


def main() -> None:
    options = arguments(__doc__)
    count, turns = (2000, 3) if options.quick else (20000, 15)
    samples: dict[tuple[str, str], list[float]] = {}
    x = torch.ones(1)
    for _ in range(turns):
        both = Both()
        for name in ("draws_nothing", "may_draw"):
            samples.setdefault((name, "torch"), []).append(both(name, x, count))
        lamina.init()
        model = lamina.distribute(both)
        in_step = lamina.step(lambda name, x, model=model: model(name, x, count))
        for name in ("draws_nothing", "may_draw"):
            samples.setdefault((name, "in a step"), []).append(in_step(name, x)[0])
        lamina.shutdown()
    report = Report(options.name or "local_call", "A call of a module of the same rank")
    for (name, figure), values in samples.items():
        report.add(name.replace("_", " "), figure, "us", values)
    report.finish()


if __name__ == "__main__":
    main()
