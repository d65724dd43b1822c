# SPDX-License-Identifier: Apache-2.0
"""Updates of parameters that another rank owns, beside torch's DistributedOptimizer over RPC, in turns in one run.

    lamina run -n 5 benchmarks/remote_updates.py

Rank 0 owns 1,000 parameters of 1,000 elements, the four others train them. In a round each trainer runs a forward and a
backward there, all meet, and all call `step(context)`: an update of all parameters for each of them. The figure is
updates in a second, from the first call to the last return; one thread computes in each process.
  quiet       nothing else runs
  busy        a process beside the owner spins: it takes a processor, but no GIL of the owner's
  spinning    a thread of Python spins in the owner, which takes the GIL again and again
`cost` is the time that this adds to the quiet case, by the medians, `cost of GIL` what spinning adds to busy.
"""

import signal
import subprocess
import sys
import threading
import time
from functools import partial

import torch
from measure import Report, arguments
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

import lamina
from lamina import remote
from lamina.optim import DistributedOptimizer

TRAINERS = 4
PARAMETERS, ELEMENTS = 1000, 1000
CLASSES = {"SGD": (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}), "AdamW": (torch.optim.AdamW, {"lr": 1e-6})}


class Net(nn.Module):
    """Parameters whose gradients are what they are multiplied by."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(ELEMENTS)) for _ in range(PARAMETERS))
        self.factors = torch.ones(PARAMETERS * ELEMENTS)

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.weights)).dot(self.factors)


class Disturbance:
    """A process that spins, or a thread of this one, while a case asks for it."""

    def __init__(self):
        self._wanted = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()
        self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.set("quiet")

    def _spin(self) -> None:
        while True:
            self._wanted.wait()
            while self._wanted.is_set():
                pass

    def set(self, case: str) -> None:
        """Has that one spin from now on which the case names, if any."""
        self._wanted.set() if case == "spinning" else self._wanted.clear()
        self._process.send_signal(signal.SIGCONT if case == "busy" else signal.SIGSTOP)

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def called(net: rpc.RRef) -> torch.Tensor:
    """Runs on the owner, for torch's trainers."""
    return net.local_value()()


def parameters_of(net: rpc.RRef) -> list[rpc.RRef]:
    """Runs there, too."""
    return [rpc.RRef(parameter) for parameter in net.local_value().parameters()]


class OfLamina:
    """An iteration of lamina's."""

    def __init__(self, kind: type, keywords: dict[str, float]):
        self._net = remote.place(Net, owner=0)
        self._optimizer = DistributedOptimizer(kind, self._net.parameters(), **keywords)

    def round(self) -> tuple[float, float]:
        with remote.context() as context:
            remote.backward(context, self._net())
            return timed(partial(self._optimizer.step, context))


class OfTorch:
    """One of torch's."""

    def __init__(self, kind: type, keywords: dict[str, float]):
        self._net = rpc.remote("rank0", Net)
        self._optimizer = TorchOptimizer(kind, rpc.rpc_sync("rank0", parameters_of, (self._net,)), **keywords)

    def round(self) -> tuple[float, float]:
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("rank0", called, (self._net,))])
            return timed(partial(self._optimizer.step, context))


def timed(step) -> tuple[float, float]:
    """Begin and end of a step, which all trainers begin together. The clock is the machine's."""
    lamina.barrier()
    begin = time.monotonic()
    step()
    return begin, time.monotonic()


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    lamina.init()
    rank = lamina.rank()
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=lamina.size())
    report = Report(options.name or "remote_updates", "Updates of 1,000 parameters on another rank, by 4 trainers")
    disturbance = Disturbance() if rank == 0 else None
    for name, (kind, keywords) in CLASSES.items():
        of = {"lamina": OfLamina, "torch rpc": OfTorch}
        engines = {engine: make(kind, keywords) if rank else None for engine, make in of.items()}
        samples: dict[tuple[str, str], list[float]] = {}
        for index in range(options.pick(3, 15, 40)):
            for case in ("quiet", "busy", "spinning"):
                if disturbance is not None:
                    disturbance.set(case)
                for engine, made in engines.items():
                    lamina.barrier()
                    times = made.round() if rank else timed(lambda: None)
                    spans = lamina.allgather(times, lamina.CommGroup.WORLD)[1:]
                    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
                    if index > 0:
                        samples.setdefault((engine, case), []).append(TRAINERS / span)
        if disturbance is not None:
            disturbance.set("quiet")
            add(report, name, samples)
    if disturbance is not None:
        disturbance.end()
        report.finish()
    rpc.shutdown()
    lamina.shutdown()


def add(report: Report, name: str, samples: dict[tuple[str, str], list[float]]) -> None:
    """The rows of one class."""
    medians = {key: sorted(each)[len(each) // 2] for key, each in samples.items()}
    for (engine, case), each in samples.items():
        more = {}
        if engine == "lamina":
            more["of_torch"] = medians[engine, case] / medians["torch rpc", case]
        if case != "quiet":
            more["cost"] = medians[engine, "quiet"] / medians[engine, case] - 1
        if case == "spinning":
            more["cost_of_GIL"] = medians[engine, "busy"] / medians[engine, case] - 1
        report.add(f"{name}, {case}", engine, "updates/s", each, **more)


if __name__ == "__main__":
    main()
