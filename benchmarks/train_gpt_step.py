# SPDX-License-Identifier: Apache-2.0
"""A training step of the demo's model (examples/gpt.py): lamina over two ranks beside the plain loop in one process.

    lamina run -n 2 benchmarks/train_gpt_step.py

Same model, batch and optimizer, in turns in one run; a sample is the mean of a few steps. The plain loop runs on rank 0
while rank 1 sleeps, in three ways. It has one thread, as each rank of lamina has, with the batch whole or cut into the
same microbatches. Or it has all the threads of the machine. `of lamina` is a plain loop's figure over lamina's:
tokens/s below 1, lamina is faster; processor time (of both ranks together, waiting without sleep included) below 1,
lamina works more for the same step.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Report, arguments
from training import lamina_step

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, MICROBATCHES, VOCABULARY = 16, 128, 4, 256


def model_and_optimizer(wrap: Callable) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The demo's, from the same seed every time."""
    torch.manual_seed(0)
    model = wrap(GPT(vocabulary=VOCABULARY, width=160, layers=4, heads=4, context=CONTEXT))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def plain(microbatches: int, threads: int) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step of the ordinary loop in this process."""
    model, optimizer = model_and_optimizer(lambda model: model)

    def step(x, y):
        torch.set_num_threads(threads)
        total = 0.0
        for x_part, y_part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = model(x_part, y_part) / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_num_threads(1)
        return total

    return step


def with_lamina() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step of lamina; both ranks call it."""
    model, adamw = model_and_optimizer(lamina.distribute)
    step = lamina_step(model, lamina.DistributedOptimizer(adamw))
    return lambda x, y: step(x, y).reduce_mean().item()


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    rank, cores = dist.get_rank(), len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    lamina.init(partitions=2, microbatches=MICROBATCHES, schedule="interleaved")
    ours = "lamina, 2 ranks of 1 thread"
    steps = {ours: with_lamina()} | {
        "plain, 1 thread": plain(1, 1),
        f"plain, 1 thread, {MICROBATCHES} microbatches": plain(MICROBATCHES, 1),
        f"plain, {cores} threads": plain(1, cores),
    }
    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    rates, work = {name: [] for name in steps}, {name: [] for name in steps}
    count = 1 if options.quick else 2
    for turn in range(2 if options.quick else 6):
        for name, step in steps.items():
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(count if name == ours or rank == 0 else 0):
                step(x, y)
            elapsed, cpu = time.perf_counter() - begin, torch.tensor(time.process_time() - begin_cpu)
            dist.all_reduce(cpu)
            if turn:  # the first is for warming up
                rates[name].append(count * x.numel() / elapsed)
                work[name].append(1e3 * cpu.item() / count)
    if rank == 0:
        report = Report(options.name or "train_gpt_step", "A training step of the demo's GPT")
        for figure, unit, samples in (("throughput", "tokens/s", rates), ("processor time", "ms/step", work)):
            for name, values in samples.items():
                ratio = statistics.median(value / base for value, base in zip(values, samples[ours], strict=True))
                report.add(name, figure, unit, values, of_lamina=ratio)
        report.note(f"{cores} virtual cores, which may share one physical core: a speed-up by two cannot be seen here;")
        report.note("where other programs run too, two ranks get two shares of the time, one process gets one, and")
        report.note(
            "threads of one process wait for each other: compare the processor time then, of all ranks together"
        )
        report.finish()
    lamina.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
