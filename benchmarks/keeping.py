# SPDX-License-Identifier: Apache-2.0
"""Costs of kept states: steps of a GPT of 8 million parameters with AdamW, of which ranks keep versions each update,
each ten, or never.

    lamina run -n 4 benchmarks/keeping.py

Blocks of steps take turns. `of no versions` is the median of the ratios to the block without versions of the same
round. `kept` is what a rank sends to its keeper in the mean of all steps.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from measure import Options, Report, arguments

import lamina
from lamina.elastic.kept import KeptSurvivors
from lamina.job import current

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

STEPS, NEVER = 10, 10**9  # of a block; updates
LAYOUTS = {
    "partitions": lambda ranks: {"partitions": ranks, "microbatches": ranks},
    "shards": lambda ranks: {
        "sharded_data_parallel_degree": ranks,
        "sdp_gradient_clipping": None,
        "sdp_param_persistence_threshold": 0,
    },
}


class Updates:
    """A training, as survivors see it."""

    progress, shares_any = 0, False

    def state(self) -> int:
        return self.progress


def measured(layout: str, options: Options, report: Report) -> None:
    lamina.init(LAYOUTS[layout](int(os.environ["WORLD_SIZE"])) | {"ddp": True})
    torch.manual_seed(0)
    model = lamina.DistributedModel(GPT(vocabulary=256, width=320, layers=6, heads=8, context=64))
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    (state,) = current.job().optimizers
    x = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(lamina.dp_rank()))

    @lamina.step
    def step(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    def block(every: int) -> float:
        """Seconds of a step, of all ranks."""
        lamina.barrier()
        begin = time.perf_counter()
        survivors._every = every or NEVER
        for _ in range(STEPS):
            updates.progress += 1
            optimizer.zero_grad()
            step(x[:, :-1], x[:, 1:])
            optimizer.step()
        lamina.barrier()
        return (time.perf_counter() - begin) / STEPS

    updates = Updates()
    survivors = KeptSurvivors(model, state, updates, 1, [])
    survivors.begin()
    current.job().before_step = survivors.look
    block(1)
    taken = {every: [] for every in (0, 1, 10)}
    for _ in range(options.pick(1, 5, 15)):
        for every, samples in taken.items():
            samples.append(1e3 * block(every))
    sent = survivors._engine.sent_bytes / updates.progress
    if lamina.rank() == 0:
        names = {0: "no versions", 1: "each update", 10: "each 10 updates"}
        for every, samples in taken.items():
            ratio = statistics.median(own / plain for own, plain in zip(samples, taken[0], strict=True))
            report.add(layout, f"step, {names[every]}", "ms", samples, of_no_versions=ratio)
        report.add(layout, "kept, rank 0", "MB", [sent / 1e6])
    survivors.end()
    lamina.shutdown()


def main() -> None:
    options = arguments(__doc__)
    report = Report(options.name or "keeping", "Kept states")
    for layout in LAYOUTS:
        measured(layout, options, report)
    if int(os.environ["RANK"]) == 0:
        report.finish()


if __name__ == "__main__":
    main()
