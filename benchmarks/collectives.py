# SPDX-License-Identifier: Apache-2.0
"""Collectives over shared memory beside Gloo's and beside copying alone, in turns in one run.

    lamina run -n 2 benchmarks/collectives.py

The size is that of the whole: what an all-gather makes, what a reduce-scatter and an all-reduce take. A sample is the
median of a block of calls of rank 0, each after a barrier; the ratios are medians of those of neighbouring blocks.
  lamina     from ordinary tensors
  allocated  the same, from tensors that the group's backend has allocated
  withheld   an all-reduce from ordinary tensors where the members may not read each other's memory
  gloo       from ordinary tensors
  copies     every rank copies as many bytes as it gets, at the same time: a floor for an all-gather
The largest all-reduce is also made beside a process that computes, which the ranks share their processors with.
"""

import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from measure import Report, arguments

import lamina  # noqa: F401 - names the backend

PR_SET_DUMPABLE = 4
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


def group_without_rights() -> dist.ProcessGroup:
    """A group that has found out, in its first large all-reduce, that its members may not read each other's memory."""
    group = dist.new_group(backend="lamina")
    prctl, is_root = ctypes.CDLL(None).prctl, os.geteuid() == 0
    prctl(PR_SET_DUMPABLE, 0)
    if is_root:
        os.seteuid(65534)
    dist.barrier()
    dist.all_reduce(torch.ones(1 << 20), group=group)
    dist.barrier()
    if is_root:
        os.seteuid(0)
    prctl(PR_SET_DUMPABLE, 1)
    return group


@contextlib.contextmanager
def busy_process(beside: bool) -> Iterator[None]:
    """Another process computes meanwhile, beside the ranks; one for all of them."""
    if not beside or dist.get_rank() != 0:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    groups = {"lamina": dist.new_group(backend="lamina"), "gloo": dist.group.WORLD, "withheld": group_without_rights()}
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
        cases = [(name, False) for name in ordinary]
        if size == list(SIZES)[-1]:
            cases.append(("all_reduce", True))
        for name, busy in cases:
            calls = {
                "lamina": partial(ordinary[name], groups["lamina"]),
                "allocated": partial(allocated[name], groups["lamina"]),
                "gloo": partial(ordinary[name], groups["gloo"]),
                "copies": partial(target.copy_, source),
            }
            if name == "all_reduce":
                calls["withheld"] = partial(ordinary[name], groups["withheld"])
            samples: dict[str, list[float]] = {contender: [] for contender in calls}
            with busy_process(busy):
                for _ in range(options.pick(1, 5, 11)):
                    for contender, call in calls.items():
                        samples[contender].append(block_us(call, count, barrier))
            add_rows(report, f"{name}, {size}{', busy' if busy else ''}", samples)
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


def add_rows(report: Report, case: str, samples: dict[str, list[float]]) -> None:
    for contender, values in samples.items():
        faster = [gloo / value for gloo, value in zip(samples["gloo"], values, strict=True)]
        of_copies = [value / copies for value, copies in zip(values, samples["copies"], strict=True)]
        report.add(
            case,
            contender,
            "us",
            values,
            times_as_fast_as_gloo=statistics.median(faster),
            of_copies=statistics.median(of_copies),
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
