# SPDX-License-Identifier: Apache-2.0
"""A training step of the demo's model (examples/gpt.py) over two ranks: lamina beside torch's Schedule1F1B.

    lamina run -n 2 benchmarks/train_gpt_pipeline.py

The same model, its head not tied to its embedding, cut in the same place, half of the blocks on each rank; the same
batch, microbatches and AdamW; in turns in one run. A sample is the mean of a few steps, from a barrier until the last
rank is done. lamina computes the loss on rank 0, whither the logits go, torch on rank 1. `of torch` is the median, over
the turns, of lamina's time over torch's.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Report, arguments
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from training import lamina_step

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, MICROBATCHES, VOCABULARY, LAYERS = 16, 128, 8, 256, 4
OURS, TORCH = "lamina interleaved", "torch Schedule1F1B"

Step = Callable[[torch.Tensor, torch.Tensor], None]


def untied_gpt() -> GPT:
    """The demo's model from the same seed every time, with a head of its own."""
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=160, layers=LAYERS, heads=4, context=CONTEXT)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def second_half(model: GPT) -> list[nn.Module]:
    """The part that rank 1 owns."""
    return [*model.blocks[LAYERS // 2 :], model.norm, model.head]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def with_lamina() -> Step:
    """A step of lamina."""
    plain = untied_gpt()
    for module in second_half(plain):
        lamina.set_partition(module, 1)
    model = lamina.distribute(plain)
    return lamina_step(model, lamina.DistributedOptimizer(adamw(model)))


def with_torch() -> Step:
    """A step of torch's schedule."""
    rank, model = dist.get_rank(), untied_gpt()
    parts = [nn.Sequential(model.embedding, *model.blocks[: LAYERS // 2]), nn.Sequential(*second_half(model))]
    optimizer = adamw(parts[rank])
    schedule = Schedule1F1B(
        PipelineStage(parts[rank], rank, 2, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    )

    def step(x, y):
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lamina.init(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    steps = {OURS: with_lamina(), TORCH: with_torch()}
    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    times, work = {name: [] for name in steps}, {name: [] for name in steps}
    count = 1 if options.quick else 3
    for turn in range(3 if options.quick else 13):
        for name, step in steps.items():
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                step(x, y)
            elapsed, cpu = torch.tensor(time.perf_counter() - begin), torch.tensor(time.process_time() - begin_cpu)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            dist.all_reduce(cpu)
            if turn:  # the first is for warming up
                times[name].append(1e3 * elapsed.item() / count)
                work[name].append(1e3 * cpu.item() / count)
    if dist.get_rank() == 0:
        report = Report(options.name or "train_gpt_pipeline", "A training step of the demo's GPT over two ranks")
        for figure, samples in (("step", times), ("processor time", work)):
            for name, values in samples.items():
                ratio = statistics.median(a / b for a, b in zip(values, samples[TORCH], strict=True))
                report.add(name, figure, "ms", values, of_torch=ratio)
        report.finish()
    lamina.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
