# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a model with a copy on each rank, beside torch's own data parallelism, in turns in one run.

    lamina run -n 2 benchmarks/data_parallel.py

A sample is one plain iteration of rank 0, all ranks beginning together. Eight pairs of linear layers, 16.8 million
parameters in float32; the batch is small, so that gradients weigh, or large.
  lamina          lamina.distribute, with ddp
  without overlap the same with overlapping_allreduce=False
  DDP, lamina     torch's, over the backend "lamina"
  DDP, gloo       torch's, over Gloo
  alone           the model itself: what of it is computing
"""

import statistics
import time

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lamina

WIDTH = 512
BATCHES = {"64 rows": 64, "512 rows": 512}


def model() -> nn.Module:
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8))
    return nn.Sequential(*pairs)


def iteration_ms(net: nn.Module, x: torch.Tensor) -> float:
    """One forward and backward."""
    for parameter in net.parameters():
        parameter.grad = None
    begin = time.perf_counter()
    net(x).square().mean().backward()
    return 1e3 * (time.perf_counter() - begin)


def of_lamina(x: torch.Tensor, count: int, overlap: bool) -> list[float]:
    """Samples of a job of lamina's own, which has one model."""
    lamina.init(ddp=True)
    net = lamina.distribute(model(), overlapping_allreduce=overlap)
    samples = measured(net, x, count)
    lamina.shutdown()
    return samples


def measured(net: nn.Module, x: torch.Tensor, count: int) -> list[float]:
    """Samples after two iterations that are not counted."""
    samples = []
    for _ in range(count + 2):
        dist.barrier()
        samples.append(iteration_ms(net, x))
    return samples[2:]


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("lamina")
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    nets = {
        "DDP, lamina": DistributedDataParallel(model()),
        "DDP, gloo": DistributedDataParallel(model(), process_group=gloo),
        "alone": model(),
    }
    report = Report(
        options.name or "data_parallel",
        f"An iteration with a copy of the model on each of {dist.get_world_size()} ranks",
    )
    for batch, rows in BATCHES.items():
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))
        count = options.pick(2, 4, 6)
        samples: dict[str, list[float]] = {}
        for _ in range(options.pick(1, 5, 9)):
            samples.setdefault("lamina", []).append(statistics.median(of_lamina(x, count, True)))
            samples.setdefault("lamina without overlap", []).append(statistics.median(of_lamina(x, count, False)))
            for name, net in nets.items():
                samples.setdefault(name, []).append(statistics.median(measured(net, x, count)))
        for name, values in samples.items():
            of_peers = {}
            for peer in ("gloo", "lamina"):
                ratios = [value / other for value, other in zip(values, samples[f"DDP, {peer}"], strict=True)]
                of_peers[f"of_DDP_over_{peer}"] = statistics.median(ratios)
            report.add(batch, name, "ms", values, **of_peers)
    if rank == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
