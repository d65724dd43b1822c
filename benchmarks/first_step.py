# SPDX-License-Identifier: Apache-2.0
"""The time from the start of `lamina run` until a job's first step has ended on all ranks, and until an optimizer of
torch's has then made its first update. Jobs have 1 and 8 ranks on one machine, with and without `--preload`, in turns.

The step is a forward and a backward of a tiny model, which has as many partitions as there are ranks. `of one rank` is
the median over turns. Beside the time, the processor time of all processes of the job, from its start to its end, which
other programs on the machine change less.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import LAMINA, Report, arguments

PRELOAD = ["--preload", "torch,lamina"]
RANKS = 8
FIGURES = ["first step", "first update", "processor time"]
PROGRAM = """
import os, pathlib, sys, time
import torch
from torch import nn
import lamina

lamina.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=2)
model = lamina.distribute(nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]))

@lamina.step
def step(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

step(torch.ones(4, 16))
stepped = time.monotonic()
lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters())).step()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{stepped} {time.monotonic()}")
lamina.shutdown()
"""


def processor_s() -> float:
    """The processor time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(ranks: int, flags: list[str], folder: Path) -> list[float]:
    """Runs one job. Returns its figures, in seconds; those of its last rank."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    used = processor_s()
    begin = time.monotonic()  # one clock for all processes of the machine
    subprocess.run(
        [LAMINA, "run", *flags, "-n", str(ranks), str(program), str(folder)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    used = processor_s() - used
    said = [map(float, (folder / str(rank)).read_text().split()) for rank in range(ranks)]
    return [max(moments) - begin for moments in zip(*said, strict=True)] + [used]


def main() -> None:
    options = arguments(__doc__)
    turns = options.pick(1, 3, 7)
    report = Report(options.name or "first_step", "A job from its start until all ranks have trained")
    cases = [(ranks, flags) for flags in ([], PRELOAD) for ranks in (1, RANKS)]
    samples = [[] for _ in cases]
    with tempfile.TemporaryDirectory() as name:
        start(1, [], Path(name))  # the files of torch come into the machine's memory
        for _ in range(turns):
            for (ranks, flags), got in zip(cases, samples, strict=True):
                got.append(start(ranks, flags, Path(name)))
                print(ranks, *flags, *got[-1], file=sys.stderr, flush=True)
    for (ranks, flags), got, alone in zip(cases, samples, [samples[0]] * 2 + [samples[2]] * 2, strict=True):
        case = " ".join([f"{ranks} rank{'s' * (ranks > 1)}", *flags])
        for place, figure in enumerate(FIGURES):
            ratio = median(ours[place] / one[place] for ours, one in zip(got, alone, strict=True))
            more = {"of_one_rank": ratio} if ranks > 1 else {}
            report.add(case, figure, "s", [each[place] for each in got], **more)
    report.finish()


if __name__ == "__main__":
    main()
