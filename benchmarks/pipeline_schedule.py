# SPDX-License-Identifier: Apache-2.0
"""The schedule on sleeping devices (sleeping.py), lamina beside torch.distributed.pipelining, in turns in one run.

    lamina run -n P benchmarks/pipeline_schedule.py

A chain of P stages, one per rank, m microbatches of 4 KiB. In a V there are twice as many of half the time, which go to
the last rank and back. Half of a backward is for the stage's weight, where nothing else is said. A sample is one step,
from a barrier until the last rank has left it. `of ideal` is the median of samples over 1F1B's (m + P - 1) * (tf + tb):
one forward and one backward took tf and tb alone, in the same turn. lamina computes the loss on rank 0 (one hop more,
each way, in a chain), torch on that of the last stage.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from measure import Report, arguments
from sleeping import Stage, seconds_alone
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import lamina

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH = 1024
PEERS = {
    "torch ScheduleGPipe": ScheduleGPipe,
    "torch Schedule1F1B": Schedule1F1B,
    "torch InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "torch ZBVZeroBubble, in a V": ScheduleZBVZeroBubble,
}

Step = Callable[[], object]


def stages_of(p: int, in_v: bool, share: float = 0.5) -> list[tuple[int, Stage]]:
    """Stages in their order, each with its rank; `share` of a backward is for the weight."""
    ranks = [*range(p), *reversed(range(p))] if in_v else range(p)
    part = p / len(ranks)
    return [(rank, Stage(part * FORWARD_S, part * BACKWARD_S, part * share * BACKWARD_S)) for rank in ranks]


def largest(value: float) -> float:
    """Over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


@contextmanager
def lamina_step(
    m: int, schedule: str, active: int | None = None, in_v: bool = False, share: float = 0.5
) -> Iterator[Step]:
    """A step of lamina; `active` is the key active_microbatches, None its default."""
    p = dist.get_world_size()
    window = {} if active is None else {"active_microbatches": active}
    lamina.init(partitions=p, microbatches=m, schedule=schedule, auto_partition=False, default_partition=0, **window)
    stages = stages_of(p, in_v, share)
    for rank, stage in stages:
        lamina.set_partition(stage, rank)
    model = lamina.distribute(nn.Sequential(*(stage for _, stage in stages)))
    batch = torch.ones(m, WIDTH)

    @lamina.step
    def step(x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    yield lambda: step(batch)
    lamina.shutdown()


@contextmanager
def torch_step(m: int, schedule: type) -> Iterator[Step]:
    """A step of one of torch's own schedules."""
    rank, p = dist.get_rank(), dist.get_world_size()
    all_stages = stages_of(p, in_v=schedule is ScheduleZBVZeroBubble)
    own = [
        PipelineStage(stage, index, len(all_stages), torch.device("cpu"))
        for index, (place, stage) in enumerate(all_stages)
        if place == rank
    ]
    of_one = schedule in (ScheduleGPipe, Schedule1F1B)
    runner = schedule(own[0] if of_one else own, m, loss_fn=lambda output, _: output.mean())
    batch = torch.ones(m, WIDTH)
    given = {"target": batch} if rank == all_stages[-1][0] else {}
    yield lambda: runner.step(*((batch,) if rank == 0 else ()), **given)


def cases(m: int) -> dict[str, Callable]:
    """The programs that are compared, each under its name."""
    ours = {
        f"lamina {schedule}, active {'default' if active is None else active}": lambda s=schedule, a=active: (
            lamina_step(m, s, a)
        )
        for schedule in ("simple", "interleaved")
        for active in (None, m)
    }
    ours |= {
        f"lamina zero_bubble{about}": lambda k=keys: lamina_step(m, "zero_bubble", **k)
        for about, keys in {"": {}, ", weights 30 %": {"share": 0.3}, ", in a V": {"in_v": True}}.items()
    }
    return ours | {name: lambda s=schedule: torch_step(m, s) for name, schedule in PEERS.items()}


def measured(step: Step, count: int) -> list[float]:
    """Seconds of `count` steps, after one that is not counted (it shapes and places what the others use)."""
    samples = []
    for _ in range(count + 1):
        dist.barrier()
        begin = time.perf_counter()
        step()
        samples.append(largest(time.perf_counter() - begin))
    return samples[1:]


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    p = dist.get_world_size()
    title = f"Schedule on sleeping devices: {p} stages, tf {1e3 * FORWARD_S:.0f} ms, tb {1e3 * BACKWARD_S:.0f} ms"
    report = Report(options.name or f"pipeline_schedule_{p}", title)
    for m in (16,) if p == 8 else options.pick((8,), (8,), (4, 8, 16)):
        alone = []
        samples = {name: [] for name in cases(m)}
        ratios = {name: [] for name in cases(m)}
        for _ in range(options.pick(2, 4, 5)):
            alone.append(largest(seconds_alone(Stage(FORWARD_S, BACKWARD_S), torch.ones(1, WIDTH))))
            for name, enter in cases(m).items():
                with enter() as step:
                    seconds = measured(step, 1 if options.quick else 2)
                samples[name] += [1e3 * value for value in seconds]
                ratios[name] += [value / ((m + p - 1) * alone[-1]) for value in seconds]
        for name, values in samples.items():
            report.add(f"m={m:<2} {name}", "step", "ms", values, of_ideal=statistics.median(ratios[name]))
        report.note(f"m={m}: ideal (m + {p - 1}) x {1e3 * statistics.median(alone):.2f} ms")
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
