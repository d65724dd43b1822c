# SPDX-License-Identifier: Apache-2.0
"""The cost of a recorded timeline: a training step of the demo's model (examples/gpt.py) over two ranks, recorded and
not.

    lamina run -n 2 benchmarks/timeline_cost.py

The same steps of one run in pairs, one of each pair recorded, which of the two comes first in turns; `more` is the
median of the pairs' ratios, less one. Where other programs run too, the processor time, of both ranks together, says
more than the wall time.
"""

import contextlib
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from measure import OUT, Report, arguments
from training import lamina_step, measured

import lamina
from lamina import _lamina
from lamina.job import current

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, MICROBATCHES, VOCABULARY = 16, 128, 4, 256


def training_step():
    torch.manual_seed(0)
    model = lamina.distribute(GPT(vocabulary=VOCABULARY, width=160, layers=4, heads=4, context=CONTEXT))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    step = lamina_step(model, optimizer)
    return lambda x, y: step(x, y).reduce_mean().item()


@contextlib.contextmanager
def recording():
    """Inside, what this rank does is recorded, into no file."""
    session = current.session()
    _lamina.start_timeline(session, str(OUT / "timeline_cost.timeline"))
    try:
        yield
    finally:
        _lamina.stop_timeline(session)


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lamina.init(partitions=2, microbatches=MICROBATCHES, schedule="interleaved")
    step = training_step()
    batch = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        step(*batch)
    figures = {False: [], True: []}
    for pair in range(4 if options.quick else 40):
        for recorded in (pair % 2 == 0, pair % 2 == 1):
            figures[recorded].append(measured(step, batch, recording() if recorded else None))
    if dist.get_rank() == 0:
        report = Report(options.name or "timeline_cost", "A training step of the demo's GPT, recorded or not")
        for figure, kind in (("step", 0), ("processor time", 1)):
            off, on = ([each[kind] for each in figures[recorded]] for recorded in (False, True))
            report.add("not recorded", figure, "ms", off)
            more = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
            report.add("recorded", figure, "ms", on, more_percent=100 * more)
        report.finish()
    lamina.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
