# SPDX-License-Identifier: Apache-2.0
"""Steps of a pipeline whose layers are cut over two ranks, beside the same pipeline with whole layers, in turns in one
run: what the turns of teams, and their collectives, add.

    lamina run -n 4 benchmarks/team_turns.py

A sample is one step of rank 0, all ranks beginning together: 8 microbatches over 2 partitions of sleeping devices. Each
stage takes 10 ms forward and 20 ms backward beside a small MLP, which is whole, or cut over two ranks.
"""

import statistics
import time

import torch
import torch.distributed as dist
from measure import Report, arguments
from sleeping import slow_down
from torch import nn

import lamina

WIDTH, MICROBATCHES, STAGES = 16, 8, 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def steps(degree: int, count: int) -> list[float]:
    """Samples of a job of its own, after two steps that are not counted."""
    lamina.init(
        partitions=2,
        microbatches=MICROBATCHES,
        tensor_parallel_degree=degree,
        ddp=degree > 1,
        prescaled_batch=True,
        auto_partition=False,
        default_partition=0,
    )
    torch.manual_seed(0)
    net = nn.Sequential(*(mlp() for _ in range(STAGES)))
    for number, stage in enumerate(net):
        slow_down(stage, 0.010, 0.020)
        lamina.set_partition(stage, number)
    lamina.set_tensor_parallelism(net, plan={"*.0": "colwise", "*.2": "rowwise"})
    model = lamina.DistributedModel(net)

    @lamina.step
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    samples = []
    for _ in range(count + 2):
        dist.barrier()
        begin = time.perf_counter()
        train(torch.ones(2 * MICROBATCHES, WIDTH))
        samples.append(1e3 * (time.perf_counter() - begin))
    lamina.shutdown()
    return samples[2:]


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = Report(options.name or "team_turns", "A step of 2 partitions, whole and cut over 2 ranks each")
    count = options.pick(2, 6, 10)
    samples: dict[str, list[float]] = {"pp 2": [], "pp 2 x tp 2": []}
    for _ in range(options.pick(1, 5, 9)):
        for degree, name in enumerate(samples, start=1):
            samples[name].append(statistics.median(steps(degree, count)))
    for name, values in samples.items():
        ratios = [value / whole for value, whole in zip(values, samples["pp 2"], strict=True)]
        report.add(f"{MICROBATCHES} microbatches", name, "ms", values, of_pp=statistics.median(ratios))
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
