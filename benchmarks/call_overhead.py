# SPDX-License-Identifier: Apache-2.0
"""The cost of a call of a module on another rank, beside the same bytes over torch's own means, in turns in one run.

    lamina run -n 2 benchmarks/call_overhead.py

The module on rank 1 multiplies by a parameter of one element. A sample is the median of a block of calls, one after the
other, made by rank 0 in one step:
  call                 forward alone, under no_grad, until the value is there
  call and backward    forward and backward of each call
  same module here     the same, with the module on rank 0: what of it is the work itself
what a call costs, and one with its backward, at the caller (rank 0) and at the owner (rank 1):
  context switches     of all threads of the process
  processor time       likewise
  Python functions     that the thread which makes the call, or serves it, enters
beside torch:
  gloo send and recv   to rank 1 and back: a floor for a call; twice that for a call and its backward
  rpc                  torch.distributed.rpc, rpc_sync of the same multiplication; with distributed autograd
"""

from functools import partial

import torch
import torch.distributed as dist
from call_costs import UNITS, Usage, costs_of, functions_of
from call_peers import of_gloo, of_rpc
from measure import Report, arguments, each_us
from torch import nn
from torch.distributed import rpc

import lamina

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
CALL, BACKWARD = "call", "call and backward"


class Scale(nn.Module):
    """x -> x times a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Both(nn.Module):
    """A small module on rank 0 and its twin on rank 1."""

    def __init__(self):
        super().__init__()
        self.here, self.there, self.usage = Scale(), Scale(), Usage()
        lamina.set_partition(self.here, 0)
        lamina.set_partition(self.there, 1)
        lamina.set_partition(self.usage, 1)

    def forward(self, given: torch.Tensor | bool, name: str) -> torch.Tensor:
        return getattr(self, name)(given)


def of_lamina(model: nn.Module, x: torch.Tensor, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of lamina, and what calls cost; both ranks call it."""
    figures, costs = {}, {}

    @lamina.step(non_split_inputs=["x"])
    def step(x):
        def call(name):
            with torch.no_grad():
                model(x, name)[0, 0].item()

        def call_and_backward(name):
            model.backward(model(x, name), gradient)

        gradient = torch.ones_like(x)
        for name, label in (("there", "lamina"), ("here", "same module here")):
            figures[f"{label}: {CALL}"] = each_us(partial(call, name), count)
            figures[f"{label}: {BACKWARD}"] = each_us(partial(call_and_backward, name), count)
        for label, each in ((CALL, call), (BACKWARD, call_and_backward)):
            made, at_owner = partial(each, "there"), partial(model, name="usage")
            found = costs_of(made, at_owner, count) | functions_of(made, at_owner, count)
            costs.update({f"lamina: {label}: {name}": cost for name, cost in found.items()})
        return torch.zeros(1)

    step(x)
    return figures, costs


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with_rpc = rpc.is_available()
    if with_rpc:
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    lamina.init(partitions=2, auto_partition=False, default_partition=0)
    model = lamina.distribute(Both())
    report = Report(options.name or "call_overhead", "A remote call of a module, one after the other")
    for size, size_bytes in SIZES.items():
        samples: dict[str, list[float]] = {}
        x = torch.ones(8, size_bytes // 32, requires_grad=True)
        count = (50 if options.quick else 300) if size_bytes < 1 << 16 else (10 if options.quick else 60)
        for _ in range(2 if options.quick else 7):
            figures, costs = of_lamina(model, x, count)
            dist.barrier()
            figures |= of_gloo(x.detach(), count)
            figures |= of_rpc(x.detach(), count) if with_rpc else {}
            dist.barrier()
            for name, value in (figures | costs).items():
                samples.setdefault(name, []).append(value)
        for name, values in samples.items():
            report.add(size, name, next((unit for cost, unit in UNITS.items() if cost in name), "us"), values)
    if rank == 0:
        report.finish()
    lamina.shutdown()
    if with_rpc:
        rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
