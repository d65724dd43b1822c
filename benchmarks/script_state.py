# SPDX-License-Identifier: Apache-2.0
"""The cost of what a step's body reaches: a training step of the demo's model (examples/gpt.py) over two ranks, whose
body updates a meter, and the same beside 10, 1,000 or 100,000 objects.

    lamina run -n 2 benchmarks/script_state.py

The objects are in dictionaries of a hundred lists, which the body looks something up in. The same steps of one run in
pairs, which of the two comes first in turns; `more` is the median of the pairs' ratios, less one. Where other programs
run too, the processor time, of both ranks together, says more than the wall time.
"""

import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Report, arguments
from training import measured, with_update

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, MICROBATCHES, VOCABULARY = 16, 128, 4, 256
COUNTS = (10, 1000, 100_000)


class Sample:
    """An object of a script."""

    def __init__(self, number: int):
        self.number = number
        self.name = f"sample {number}"


class Meter:
    """A mean, as scripts have it."""

    def __init__(self):
        self.total = self.count = 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


def tables(count: int) -> list[dict[int, list[Sample]]]:
    """Returns dictionaries of lists with that many objects together."""
    lists = [[Sample(number) for number in range(first, min(first + 100, count))] for first in range(0, count, 100)]
    return [dict(enumerate(lists[first : first + 100])) for first in range(0, len(lists), 100)]


def training_step(model, optimizer, count: int):
    reached, meter = tables(count), Meter()

    @lamina.step
    def forward_and_backward(x, y):
        loss = model(x, y)
        model.backward(loss)
        meter.update(len(reached[0][0]) if reached else 0)
        return loss

    return with_update(forward_and_backward, optimizer)


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lamina.init(partitions=2, microbatches=MICROBATCHES, schedule="interleaved")
    torch.manual_seed(0)
    model = lamina.distribute(GPT(vocabulary=VOCABULARY, width=160, layers=4, heads=4, context=CONTEXT))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    batch = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    report = Report(options.name or "script_state", "A training step of the demo's GPT, whose body reaches objects")
    alone = training_step(model, optimizer, 0)
    for count in COUNTS:
        steps = (alone, training_step(model, optimizer, count))
        for step in steps * 2:
            step(*batch)
        figures = ([], [])
        for pair in range(options.pick(4, 20, 40)):
            for which in (pair % 2, 1 - pair % 2):
                figures[which].append(measured(steps[which], batch))
        for figure, kind in (("step", 0), ("processor time", 1)):
            without, beside = ([each[kind] for each in found] for found in figures)
            report.add(f"{count:,} objects", f"{figure} without", "ms", without)
            more = statistics.median(a / b for a, b in zip(beside, without, strict=True)) - 1
            report.add(f"{count:,} objects", figure, "ms", beside, more_percent=100 * more)
    if dist.get_rank() == 0:
        report.finish()
    lamina.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
