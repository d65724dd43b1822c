# SPDX-License-Identifier: Apache-2.0
"""Collectives by levels beside flat ones, and steps of a sharded GPT, on two hosts of two ranks each that a slow cable
joins. The hosts are network namespaces, and `tc` is the cable: it lets through 1 Gbit/s each way, unless
LAMINA_BENCH_RATE says another rate (`500mbit`) or `none`. Needs root.

    lamina run -n 1 -c python benchmarks/hosts.py

`sent` is what one host sends the other meanwhile, in MB. A collective's size is that of the whole.
  by levels     across hosts first (all_gather), or last (reduce_scatter, all_reduce); across over Gloo
  within first  the other order of an all_gather
  flat          Gloo over all four ranks
A crossing is the all_gather by levels,
  Gloo          across over Gloo
  posted        across by puts into posted memory, over UCX, as in lamina's jobs
A step is forward, backward and update of the GPT of sharding.py with a tiny batch, so that communication weighs:
  degree 4           lamina, sharded over all ranks, by levels
  degree 4, flat     the same with sdp_hierarchical_allgather: false
  degree 2           lamina, sharded within each host: MiCS
  FSDP2              torch's fully_shard over all ranks, over Gloo
"""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Report, arguments
from sharding import adamw, model, sharded_by_torch
from torch import nn

import lamina
from lamina import _lamina
from lamina.job import current

HOSTS, LOCALS, CABLE, PORT = 2, 2, "cable", 29500
RATE = os.environ.get("LAMINA_BENCH_RATE", "1gbit")
INSIDE = "LAMINA_BENCH_HOSTS"  # says to what this file was started that it is one of the ranks
SIZES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20}
CROSSINGS = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "256 KiB": 256 << 10} | SIZES
SEES_ITS_DEVICES = 'mount -t sysfs none /sys && exec "$@"'  # UCX looks there
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
           "MASTER_PORT", "LAMINA_SECRET_FD", "LAMINA_LAUNCHER")  # fmt: skip


@contextlib.contextmanager
def hosts() -> Iterator[list[list[str]]]:
    """Network namespaces, joined by a cable: for each the words that begin a command in it. They go with the processes
    that hold them."""
    with contextlib.ExitStack() as stack:
        ends, enter = [], []
        for _ in range(HOSTS):
            holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            holder.stdin.write(b"!")  # comes back when it is in its namespace
            holder.stdin.flush()
            if holder.stdout.read(1) != b"!":
                raise OSError("unshare -n is refused")
            ends.append(holder.pid)
            enter.append(["nsenter", "-n", "-t", str(holder.pid), "unshare", "-m", "sh", "-c", SEES_ITS_DEVICES, "sh"])

        def do(*words: object) -> None:
            subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)

        do("ip", "link", "add", CABLE, "netns", ends[0], "type", "veth", "peer", "name", CABLE, "netns", ends[1])
        for number, host in enumerate(enter, 1):
            do(*host, "ip", "address", "add", f"10.77.0.{number}/24", "dev", CABLE)
            do(*host, "ip", "link", "set", CABLE, "up")
            do(*host, "ip", "link", "set", "lo", "up")
            if RATE != "none":
                do(*host, *f"tc qdisc add dev {CABLE} root tbf rate {RATE} burst 1mb latency 50ms".split())
        yield enter


def outside() -> None:
    """Starts this file in both hosts."""
    options = arguments(__doc__)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    launcher = Path(sys.executable).parent / "lamina"
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment |= {"GLOO_SOCKET_IFNAME": CABLE, INSIDE: "1"}
    try:
        if missing := [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]:
            raise OSError(f"no {missing[0]}")
        with hosts() as enter:
            place = ["--nnodes", HOSTS, "--master-addr", "10.77.0.1", "--master-port", PORT, "-n", LOCALS]
            jobs = [
                subprocess.Popen(
                    [*host, *map(str, [launcher, "run", "--node-rank", node, *place, *sys.argv])], env=environment
                )
                for node, host in enumerate(enter)
            ]
            codes = [job.wait() for job in jobs]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
    except (OSError, subprocess.CalledProcessError) as error:
        report = Report(options.name or "hosts", "Two emulated hosts")
        report.note(f"left out: no network namespaces with a slow cable here: {error} {getattr(error, 'stderr', '')}")
        report.finish()


def sent() -> int:
    """Bytes that this host has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == CABLE:
            return int(counts.split()[8])
    raise OSError(f"there is no {CABLE}")


Sample = tuple[float, float]  # milliseconds, and the MB that this host sends meanwhile


def sample(call: Callable[[], object]) -> Sample:
    """One of a call, all ranks beginning together."""
    dist.barrier()
    before, begin = sent(), time.perf_counter()
    call()
    took = 1e3 * (time.perf_counter() - begin)
    dist.barrier()
    return took, 1e-6 * (sent() - before)


def add(report: Report, case: str, rounds: dict[str, list[Sample]], peer: str) -> None:
    for name, samples in rounds.items():
        times = [took for took, _ in samples]
        ratios = [took / other for took, (other, _) in zip(times, rounds[peer], strict=True)]
        more = {f"of_{peer}": statistics.median(ratios), "sent": statistics.median(mb for _, mb in samples)}
        report.add(case, name, "ms", times, **more)


Ways = dict[str, Callable[[], object]]


def tensors(size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of an all_gather of that size, and a part that a rank gives."""
    whole = torch.ones(size_bytes // 4)
    return whole, torch.ones(whole.numel() // (HOSTS * LOCALS))


def collectives(size_bytes: int, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> dict[str, Ways]:
    """The ways of each collective of that size."""
    levels = _lamina.make_hierarchical(inner, outer, 120.0)
    (whole, part), block = tensors(size_bytes), torch.empty(size_bytes // 4 // HOSTS)

    def within_first() -> None:
        dist.all_gather_into_tensor(block, part, group=inner)
        dist.all_gather_into_tensor(whole, block, group=outer)

    return {
        "all_gather": {
            "by levels": lambda: levels._allgather_base(whole, part).wait(),
            "within first": within_first,
            "flat": lambda: dist.all_gather_into_tensor(whole, part),
        },
        "reduce_scatter": {
            "by levels": lambda: levels._reduce_scatter_base(part, whole).wait(),
            "flat": lambda: dist.reduce_scatter_tensor(part, whole),
        },
        "all_reduce": {
            "by levels": lambda: levels.allreduce([whole]).wait(),
            "flat": lambda: dist.all_reduce(whole),
        },
    }


def crossings(size_bytes: int, levels: dict[str, dist.ProcessGroup]) -> Ways:
    whole, part = tensors(size_bytes)
    return {name: lambda group=group: group._allgather_base(whole, part).wait() for name, group in levels.items()}


def in_turns(ways: Ways, count: int) -> dict[str, list[Sample]]:
    """Samples of all ways, after one that is not counted."""
    rounds: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(count + 1):
        for name, call in ways.items():
            rounds[name].append(sample(call))
    return {name: samples[1:] for name, samples in rounds.items()}


def measure_collectives(report: Report, count: int) -> None:
    host, index = divmod(dist.get_rank(), LOCALS)
    within = [dist.new_group([each * LOCALS + i for i in range(LOCALS)], backend="lamina") for each in range(HOSTS)]
    across = [dist.new_group([each * LOCALS + i for each in range(HOSTS)]) for i in range(LOCALS)]
    inner, outer = within[host], across[index]
    for size, size_bytes in SIZES.items():
        for operation, ways in collectives(size_bytes, inner, outer).items():
            add(report, f"{operation}, {size}", in_turns(ways, count), "flat")
    lamina.init(ddp=True)
    members = [each * LOCALS + index for each in range(HOSTS)]
    levels = {
        "Gloo": _lamina.make_hierarchical(inner, outer, 120.0),
        "posted": _lamina.make_hierarchical(inner, outer, 120.0, current.session(), members),
    }
    for size, size_bytes in CROSSINGS.items():
        add(report, f"crossing, {size}", in_turns(crossings(size_bytes, levels), 5 * count), "Gloo")
    lamina.shutdown()


def iterations(net: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[Sample]:
    """Samples after two that are not counted."""
    words = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))

    def iteration() -> None:
        net(words).backward()
        optimizer.step()
        optimizer.zero_grad()

    return [sample(iteration) for _ in range(count + 2)][2:]


def of_lamina(degree: int, by_levels: bool, count: int) -> list[Sample]:
    """Samples of a job of lamina's own."""
    lamina.init(
        ddp=True,
        sharded_data_parallel_degree=degree,
        sdp_hierarchical_allgather=by_levels,
        sdp_param_persistence_threshold=10_000,
    )
    net = lamina.distribute(model())
    samples = iterations(net, lamina.DistributedOptimizer(adamw(net)), count)
    lamina.shutdown()
    return samples


def measure_steps(report: Report, turns: int, count: int) -> None:
    net = sharded_by_torch(dist.group.WORLD)
    optimizer = adamw(net)
    ways = {
        "degree 4": lambda: of_lamina(4, True, count),
        "degree 4, flat": lambda: of_lamina(4, False, count),
        "degree 2": lambda: of_lamina(2, True, count),
        "FSDP2": lambda: iterations(net, optimizer, count),
    }
    rounds: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            rounds[name] += way()
    add(report, "step", rounds, "FSDP2")


def inside() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report = Report(options.name or "hosts", f"{HOSTS} emulated hosts of {LOCALS} ranks, {RATE} between them")
    measure_collectives(report, options.pick(2, 10, 20))
    measure_steps(report, options.pick(1, 2, 4), options.pick(1, 3, 3))
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    inside() if INSIDE in os.environ else outside()
