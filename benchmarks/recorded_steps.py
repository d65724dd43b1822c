# SPDX-License-Identifier: Apache-2.0
"""The cost of a run that `lamina verify` records: a training step of the demo's model (examples/gpt.py), recorded and
not, on one rank or over two partitions.

    lamina run -n 2 benchmarks/recorded_steps.py

The jobs of one process in turns, one of each pair recorded; `times` is the ratio of the medians. A recorded job of many
small modules follows, and the memory of the process over its steps.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from training import lamina_step

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, VOCABULARY, WIDTH = 8, 128, 256, 384


class Small(nn.Module):
    """A thousand modules that hardly compute anything."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))

    def forward(self, x, _):
        return self.layers(x).square().mean()


def job(make, batch, steps: int, folder: str | None) -> tuple[list[float], list[float]]:
    """Milliseconds of each step of a job, and the megabytes of this process after it."""
    if folder is None:
        os.environ.pop("LAMINA_VERIFY_FOLDER", None)
    else:
        os.environ |= {"LAMINA_VERIFY_FOLDER": folder, "LAMINA_VERIFY_STEPS": str(steps + 3)}
    lamina.init(partitions=dist.get_world_size(), microbatches=2)
    torch.manual_seed(0)
    model = lamina.distribute(make())
    step = lamina_step(model, lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3)))
    times, sizes = [], []
    for _ in range(2):
        step(*batch)
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step(*batch).reduce_mean()
        dist.barrier()
        times.append(1e3 * (time.perf_counter() - begin))
        sizes.append(resident())
    lamina.shutdown()
    return times, sizes


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    small = torch.ones(2, 4, 4)

    def gpt():
        return GPT(vocabulary=VOCABULARY, width=WIDTH, layers=4, heads=6, context=CONTEXT)

    cases = {
        f"GPT of width {WIDTH}, {SEQUENCES * CONTEXT} tokens": (gpt, text, options.pick(1, 4, 10)),
        "1,000 modules of 4 x 4": (lambda: Small(1000), small, options.pick(1, 2, 5)),
    }
    report = Report(options.name or "verify", "A training step that lamina verify records, or not")
    with tempfile.TemporaryDirectory() as temporary:
        folders = 0
        for name, (make, batch, rounds) in cases.items():
            times, sizes = {False: [], True: []}, []
            for _ in range(rounds):
                for recorded in (False, True):
                    folders += 1
                    folder = Path(temporary, str(folders))
                    folder.mkdir()
                    taken, held = job(make, batch, options.pick(2, 5, 10), str(folder) if recorded else None)
                    times[recorded] += taken
                    sizes += held if recorded else []
            plain = report.add(f"{name}", "step, not recorded", "ms", times[False])
            report.add(f"{name}", "step, recorded", "ms", times[True], times=statistics.median(times[True]) / plain)
        _, sizes = job(lambda: Small(100), small, options.pick(3, 30, 100), temporary)
        report.add("100 modules of 4 x 4", "memory, first recorded steps", "MB", sizes[:3])
        report.add("100 modules of 4 x 4", "memory, last recorded steps", "MB", sizes[-3:])
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
