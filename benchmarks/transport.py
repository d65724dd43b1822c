# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes of one machine: lamina's transport beside c10d's Gloo, in turns.

python benchmarks/transport.py PATH_TO_transport_bench
"""

import multiprocessing
import os
import random
import statistics
import time

from measure import Report, arguments, output_of

SIZES = [8, 4096, 65536, 1 << 20, 64 << 20]
TURNS = 3


def gloo_rank(rank, port, results):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        rounds = min(500, max(2, (16 << 20) // size))
        seconds = []
        for _ in range(9):
            begin = time.perf_counter()
            for _ in range(rounds):
                if rank == 0:
                    dist.send(tensor, 1)
                dist.recv(tensor, 1 - rank)
                if rank == 1:
                    dist.send(tensor, 0)
            seconds.append((time.perf_counter() - begin) / rounds)
        if rank == 0:
            results.put((size, statistics.median(seconds)))
    dist.destroy_process_group()


def free_port():
    return random.randint(20000, 32000)


def measure_gloo():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    ranks = [context.Process(target=gloo_rank, args=(rank, port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    measured = dict(results.get(timeout=300) for _ in SIZES)
    for rank in ranks:
        rank.join()
    return measured


def measure_lamina(program):
    lines = output_of(program, free_port(), *SIZES).splitlines()
    return {int(size): float(seconds) for size, seconds in map(str.split, lines)}


def measure_signing(program):
    return float(output_of(program))


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = arguments(__doc__, "program")
    turns = [(measure_lamina(options.program), measure_gloo()) for _ in range(1 if options.quick else TURNS)]
    report = Report(options.name or "transport", "A tensor there and back between two processes")
    signing = [1e6 * measure_signing(options.program) for _ in turns]
    report.add("a message signed and checked", "lamina's transport", "us", signing)
    for size in SIZES:
        for name, index in (("lamina's transport", 0), ("torch gloo", 1)):
            seconds = [turn[index][size] for turn in turns]
            rate = 2e-9 * size / statistics.median(seconds)
            report.add(f"{size} B", name, "us", [1e6 * value for value in seconds], one_way_GBps=rate)
    report.finish()


if __name__ == "__main__":
    main()
