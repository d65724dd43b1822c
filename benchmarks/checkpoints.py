# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a GPT of 100 million parameters with AdamW, sharded over the ranks. Beside them are those of
torch.distributed.checkpoint of the same model under FSDP2. Both save, synchronously and not, and load, in turns, in
memory (tmpfs) and on a disk.

    lamina run -n 2 benchmarks/checkpoints.py

Times are those of the slowest rank, after a barrier. `times torch` of a row is the median of the ratios to torch's in
the same round. Both sync their files; lamina's have checksums, too, which loading compares. `standing still` is the
time until an asynchronous save lets training go on; `one copy` that of a copy of what this rank saves into memory that
is there. `peak` is the most memory that a rank takes on top meanwhile. What four ranks have saved two others load, too.
"""

import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import LAMINA, OUT, Options, Report, arguments, output_of
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT


def network(quick: bool) -> GPT:
    torch.manual_seed(0)
    width, layers = (256, 4) if quick else (768, 14)
    return GPT(vocabulary=256, width=width, layers=layers, heads=8, context=64)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(256, (2, 65))
    return x[:, :-1], x[:, 1:]


class Ours:
    """lamina's model and saves."""

    name = "lamina"

    def __init__(self, quick: bool):
        self.model = lamina.DistributedModel(network(quick))
        self.optimizer = lamina.DistributedOptimizer(lamina.optim.AdamW(self.model.parameters()))

    def step(self) -> None:
        self.model(*batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        lamina.save_checkpoint(folder, "a")

    def begin(self, folder: Path) -> Callable[[], None]:
        return lamina.save_checkpoint(folder, "a", asynchronous=True).wait

    def load(self, folder: Path) -> None:
        lamina.resume_from_checkpoint(folder)


class Torchs:
    """FSDP2 and torch.distributed.checkpoint."""

    name = "torch"

    def __init__(self, quick: bool):
        self.model = network(quick)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._group = dist.new_group(backend="gloo")  # of the thread that saves while training goes on

    def step(self) -> None:
        self.model(*batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.states(), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))

    def begin(self, folder: Path) -> Callable[[], None]:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        return dcp.async_save(self.states(), storage_writer=writer, process_group=self._group).result

    def load(self, folder: Path) -> None:
        dcp.load(self.states(), storage_reader=dcp.FileSystemReader(folder))


def timed(act: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    return slowest(time.perf_counter() - begin)


def slowest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def status(key: str) -> float:
    """A number of this process's, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) / 1024


def with_peak(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB on top at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    seconds = timed(act)
    return seconds, slowest(status("VmHWM") - before)


def one_copy(system: Torchs) -> float:
    """Seconds of a copy of what this rank saves."""
    held = []
    for parameter, state in system.optimizer.state.items():
        held += [parameter, state["exp_avg"], state["exp_avg_sq"]]
    sources = [each.to_local().detach() for each in held]
    copies = [torch.ones_like(each) for each in sources]

    def copy() -> None:
        for source, to in zip(sources, copies, strict=True):
            to.copy_(source)

    copy()
    return timed(copy)


def folders() -> Iterator[tuple[str, Path]]:
    """(name, folder) of each kind of disk; all ranks have the same."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name, parent in (("tmpfs", "/dev/shm"), ("disk", str(OUT))):
        found = [tempfile.mkdtemp(prefix="lamina-bench-", dir=parent) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        try:
            yield name, Path(found[0])
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(found[0], ignore_errors=True)


def remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def asynchronous(system: Ours | Torchs, folder: Path, steps: int) -> tuple[float, float, float]:
    """Seconds that training stands still, seconds a step during the save over those of one without, and MiB on top."""
    plain = statistics.median(timed(system.step) for _ in range(steps))
    under_way: list[Callable[[], None]] = []
    still, peak = with_peak(lambda: under_way.append(system.begin(folder)))
    during = statistics.median(timed(system.step) for _ in range(steps))
    under_way[0]()
    return still, during / plain, max(peak, slowest(status("VmHWM") - status("VmRSS")))


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    lamina.init(ddp=True, sharded_data_parallel_degree=ranks, sdp_gradient_clipping=1e9)
    report = Report(
        options.name or "checkpoints", f"Checkpoints of a GPT of 100 M parameters with AdamW, {ranks} ranks"
    )
    systems = [Ours(options.quick), Torchs(options.quick)]
    for system in systems:
        system.step()
    size = 12 * sum(parameter.numel() for parameter in network(options.quick).parameters())
    taken: dict[tuple[str, str, str], list[float]] = {}

    def note(case: str, figure: str, name: str, value: float) -> None:
        taken.setdefault((case, figure, name), []).append(value)

    for disk, folder in folders():
        for number in range(options.pick(1, 5, 7)):
            for system in systems if number % 2 else systems[::-1]:
                own, name = folder / system.name, system.name
                seconds, peak = with_peak(partial(system.save, own))
                note(disk, "saving, GB/s", name, size / seconds / 1e9)
                note(disk, "saving, peak MiB", name, peak)
                seconds, peak = with_peak(partial(system.load, own))
                note(disk, "loading, GB/s", name, size / seconds / 1e9)
                note(disk, "loading, peak MiB", name, peak)
                remove(own)
                still, ratio, peak = asynchronous(system, own, options.pick(1, 3, 3))
                note(disk, "standing still, ms", name, 1e3 * still)
                note(disk, "steps meanwhile, of plain", name, ratio)
                note(disk, "asynchronous, peak MiB", name, peak)
                remove(own)
            note(disk, "standing still, ms", "one copy", 1e3 * one_copy(systems[1]))
        for system in systems:
            system.save(folder / system.name)
        if dist.get_rank() == 0:
            if ranks > 2:
                for name, seconds, peak in loaded_by_two(folder, options):
                    note(disk, f"loading of {ranks} ranks' by 2, GB/s", name, size / seconds / 1e9)
                    note(disk, f"loading of {ranks} ranks' by 2, peak MiB", name, peak)
            commands(report, disk, folder, options.pick(1, 3, 5))
        dist.barrier()
    lamina.shutdown()
    if dist.get_rank() == 0:
        finish(report, taken)
    dist.destroy_process_group()


def finish(report: Report, taken: dict[tuple[str, str, str], list[float]]) -> None:
    for (case, figure, name), samples in taken.items():
        theirs = taken[case, figure, "torch"]
        ratio = statistics.median(own / (other or 1) for own, other in zip(samples, theirs, strict=True))
        what, _, unit = figure.rpartition(", ")
        ratios = {"times torch": ratio}
        if copies := taken.get((case, figure, "one copy")):
            ratios["times one copy"] = statistics.median(own / copy for own, copy in zip(samples, copies, strict=True))
        report.add(f"{case}, {what}", name, unit, samples, **ratios)
    report.finish()


def loaded_by_two(folder: Path, options: Options) -> Iterator[tuple[str, float, float]]:
    """(system, seconds, MiB on top) of each load by a job of two ranks."""
    program = [Path(__file__).with_name("load_checkpoints.py"), folder]
    effort = ["--quick"] if options.quick else ["--full"] if options.full else []
    printed = output_of(LAMINA, "run", "-n", 2, *program, *effort)
    found = json.loads(printed.splitlines()[-1])
    for name, samples in found.items():
        for seconds, peak in samples:
            yield name, seconds, peak


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commands(report: Report, disk: str, folder: Path, count: int) -> None:
    """`lamina checkpoint verify` and `merge` of what is there, beside a copy of the files, and one that is synced as
    what is merged is."""
    saved = folder / "lamina" / "a_partial"
    size = sum(path.stat().st_size for path in saved.iterdir())
    model = sum(path.stat().st_size for path in saved.glob("model-*"))
    rates: list[float] = []
    merges: dict[str, list[float]] = {"cp": [], "cp and sync": []}
    for _ in range(count):
        before = processor_s()
        output_of(LAMINA, "checkpoint", "verify", saved)
        rates.append(size / (processor_s() - before) / 1e9)
        begin = time.perf_counter()
        output_of("cp", *saved.glob("model-*"), folder)
        copied = time.perf_counter() - begin
        output_of("sync", *folder.glob("model-*"))
        synced = time.perf_counter() - begin
        begin = time.perf_counter()
        output_of(LAMINA, "checkpoint", "merge", saved, folder / "merged")
        merged = time.perf_counter() - begin
        merges["cp"].append(merged / copied)
        merges["cp and sync"].append(merged / synced)
        shutil.rmtree(folder / "merged")
        for path in folder.glob("model-*"):
            path.unlink()
    report.add(disk, "verify, of a core", "GB/s", rates)
    for copy, ratios in merges.items():
        report.add(disk, f"merge of {model / 1e9:.2f} GB", f"times {copy}", ratios)


if __name__ == "__main__":
    main()
