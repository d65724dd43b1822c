# SPDX-License-Identifier: Apache-2.0
"""The job that remote_updates.py runs: four trainers of the parameters of a fifth rank, by lamina, or by torch's
DistributedOptimizer over RPC.

    lamina run -n 5 benchmarks/remote_trainers.py lamina|torch ROUNDS

Rank 0 owns a module of 1,000 parameters of 1,000 elements, which the four others train, each with an optimizer of its
own. In a round each trainer runs a forward and a backward there, all meet, and all call `step(context)`, each of which
updates all parameters. One thread computes in each process. Rank 0 prints a line of JSON: of each class and case, the
median over rounds of updates in a second, from the first call to the last return.
  quiet       nothing else runs
  busy        a process beside the owner spins: it takes a processor, but no GIL of the owner's
  spinning    a thread of Python spins in the owner, which takes the GIL again and again
  holding     a thread of the owner has the GIL for 20 ms from the beginning of the update on, and sleeps
"""

import ctypes
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import cache, partial

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

import lamina
from lamina import remote
from lamina.optim import DistributedOptimizer

TRAINERS = 4
PARAMETERS, ELEMENTS = 1000, 1000
WARM_UP = 3  # rounds, which make states
CLASSES = {"SGD": (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}), "AdamW": (torch.optim.AdamW, {"lr": 1e-6})}


class Net(nn.Module):
    """Parameters whose gradients are what they are multiplied by."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(ELEMENTS)) for _ in range(PARAMETERS))
        self.factors = torch.ones(PARAMETERS * ELEMENTS)

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.weights)).dot(self.factors)


SPIN = """import threading
wanted = threading.Event()
wanted.set()
while wanted.is_set():
    pass
"""


class Disturbance:
    """A process that spins, or a thread of this one in the same loop, while a case asks for it."""

    def __init__(self):
        self._wanted = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()
        self._process = subprocess.Popen([sys.executable, "-c", SPIN])
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


def sleep_with_gil() -> None:
    """A call of C that keeps the GIL, as a long one of a library may."""
    ctypes.PyDLL(None).usleep(20_000)


@cache
def shared_net() -> nn.Module:
    """Runs on the owner: the module that all trainers train."""
    return Net()


def called(net: rpc.RRef) -> torch.Tensor:
    """Runs on the owner, for torch's trainers."""
    return net.local_value()()


def parameters_of(net: rpc.RRef) -> list[rpc.RRef]:
    """Runs there, too."""
    return [rpc.RRef(parameter) for parameter in net.local_value().parameters()]


class OfLamina:
    """A trainer of lamina's."""

    def __init__(self, kind: type, keywords: dict[str, float]):
        self._net = remote.find(kind.__name__, owner=0)
        self._optimizer = DistributedOptimizer(kind, self._net.parameters(), **keywords)

    def round(self) -> tuple[float, float]:
        """Begin and end of an update."""
        with remote.context() as context:
            remote.backward(context, self._net())
            return timed(partial(self._optimizer.step, context))


class OfTorch:
    """One of torch's."""

    def __init__(self, kind: type, keywords: dict[str, float]):
        self._net = rpc.remote("rank0", shared_net)
        self._optimizer = TorchOptimizer(kind, rpc.rpc_sync("rank0", parameters_of, (self._net,)), **keywords)

    def round(self) -> tuple[float, float]:
        """Begin and end of an update."""
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("rank0", called, (self._net,))])
            return timed(partial(self._optimizer.step, context))


def timed(step) -> tuple[float, float]:
    """Begin and end of a step, which all trainers begin together. The clock is the machine's."""
    lamina.barrier()
    begin = time.monotonic()
    step()
    return begin, time.monotonic()


def span_of_round(made: OfLamina | OfTorch | None, meanwhile=lambda: None) -> float:
    """Time from the first trainer's call of `step` to the last one's return. The owner, which has none, takes part, and
    does something else meanwhile."""
    lamina.barrier()
    times = made.round() if made is not None else timed(meanwhile)
    spans = lamina.allgather(times, lamina.CommGroup.WORLD)[1:]
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def main() -> None:
    engine, rounds = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    lamina.init()
    rank = lamina.rank()
    if engine == "torch":
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=lamina.size())
    disturbance = Disturbance() if rank == 0 else None
    updates_per_s: dict[str, dict[str, float]] = {}
    for name, (kind, keywords) in CLASSES.items():
        if rank == 0 and engine == "lamina":
            remote.place(Net(), name=kind.__name__)
        made = (OfLamina if engine == "lamina" else OfTorch)(kind, keywords) if rank else None
        for _ in range(WARM_UP):
            span_of_round(made)
        spans: dict[str, list[float]] = {}
        for _ in range(rounds):
            for case in ("quiet", "busy", "spinning", "holding"):
                if disturbance is not None:
                    disturbance.set(case)
                hold = sleep_with_gil if case == "holding" else lambda: None
                spans.setdefault(case, []).append(span_of_round(made, hold))
        updates_per_s[name] = {case: TRAINERS / statistics.median(each) for case, each in spans.items()}
        if disturbance is not None:
            disturbance.set("quiet")
    if disturbance is not None:
        disturbance.end()
        print(json.dumps(updates_per_s), flush=True)
    if engine == "torch":
        rpc.shutdown()
    lamina.shutdown()


if __name__ == "__main__":
    main()
