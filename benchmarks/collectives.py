# SPDX-License-Identifier: Apache-2.0
"""Collectives over shared memory beside Gloo's and beside copying alone, in turns in one run.

    lamina run -n 2 benchmarks/collectives.py

The size is that of the whole: what an all-gather makes, what a reduce-scatter and an all-reduce take. A sample is the
median of a block of calls of rank 0, each after a barrier; the ratios are medians of those of neighbouring blocks.
  lamina     from ordinary tensors
  allocated  the same, from tensors that the group's backend has allocated
  gloo       from ordinary tensors
  copies     every rank copies as many bytes as it gets, at the same time: a floor for an all-gather
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measure import Report, arguments

import lamina  # noqa: F401 - names the backend

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}


def operations(size_bytes: int, ones: Callable) -> dict[str, Callable]:
    """Each collective of that size, as a function of the group; `ones` makes tensors."""
    whole, ranks = ones(size_bytes // 4), dist.get_world_size()
    part = ones(whole.numel() // ranks)
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
    }


def block_us(call: Callable, count: int, barrier: Callable) -> float:
    """Median microseconds of a call, all ranks beginning together."""
    samples = []
    for _ in range(count + 1):
        barrier()
        begin = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(samples[1:])


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    groups = {"lamina": dist.new_group(backend="lamina"), "gloo": dist.group.WORLD}
    ranks = dist.get_world_size()
    report = Report(options.name or "collectives", f"Collectives of {ranks} ranks of one host")

    cpu = torch.device("cpu")
    backend = groups["lamina"]._get_backend(cpu)

    def allocated_ones(count: int) -> torch.Tensor:
        return backend.allocate_tensor(count, dtype=torch.float32, device=cpu).fill_(1)

    def barrier():
        dist.barrier(groups["lamina"])

    for size, size_bytes in SIZES.items():
        count = 200 if size_bytes < 1 << 16 else max(3, min(50, (256 << 20) // size_bytes))
        source = torch.ones(size_bytes // 4)
        target = torch.ones(size_bytes // 4)
        ordinary, allocated = operations(size_bytes, torch.ones), operations(size_bytes, allocated_ones)
        for name, operation in ordinary.items():
            calls = {
                "lamina": partial(operation, groups["lamina"]),
                "allocated": partial(allocated[name], groups["lamina"]),
                "gloo": partial(operation, groups["gloo"]),
                "copies": partial(target.copy_, source),
            }
            samples: dict[str, list[float]] = {contender: [] for contender in calls}
            for _ in range(options.pick(1, 5, 11)):
                for contender, call in calls.items():
                    samples[contender].append(block_us(call, count, barrier))
            for contender, values in samples.items():
                ratios = [gloo / value for gloo, value in zip(samples["gloo"], values, strict=True)]
                report.add(f"{name}, {size}", contender, "us", values, times_as_fast_as_gloo=statistics.median(ratios))
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
