# SPDX-License-Identifier: Apache-2.0
"""A step of each optimizer in one thread, in float32, without Python (optim_bench.cc), in turns with those of others.

    python benchmarks/optim.py PATH_TO_optim_bench

`over` is the median, over the turns, of a peer's time over ours: over lamina.optim for what is called from Python, over
lamina for what is called from C++. `of memory` is our time over that of loops which merely read and write what the
passes of the optimizer do. Steps follow one another: what fits into the caches is found there. Peers:

  torch.optim, fused    `torch.optim(fused=True)`
  its kernel from C++   that alone, called from C++ with lists that are made once
  torch's functional    `torch.distributed.optim._FunctionalAdamW`, compiled as torch's DistributedOptimizer compiles it
  DeepSpeed             its CPU Adam, where it is installed
"""

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from measure import Report, arguments, output_of
from torch import nn

import lamina.optim

OPTIMIZERS = ("AdamW", "SGD", "LAMB", "NovoGrad", "QHM")
KEYS = {"SGD": {"momentum": 0.9}, "QHM": {"momentum": 0.9, "nu": 0.7}}
FUSED_BY_TORCH = ("AdamW", "SGD")

LAYER = [parameter.numel() for parameter in torch.nn.TransformerEncoderLayer(512, 8).parameters()]
CASES = {
    "1 x 4 M": [1 << 22],
    "1000 x 1 k": [1000] * 1000,
    "transformer": [8192 * 512, *LAYER * 6],  # 23 M in six layers, 512 wide, and a vocabulary of 8192
}


Step = Callable[[], object]


def parameters_of(sizes: list[int]) -> list[torch.Tensor]:
    """Parameters with gradients."""
    parameters = [torch.randn(size, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


class Compiled(nn.Module):
    """A functional optimizer of torch's as its DistributedOptimizer has it."""

    def __init__(self, form):
        super().__init__()
        self.optim = form

    @torch.jit.export
    def step(self, gradients: list[torch.Tensor | None]) -> None:
        self.optim.step(gradients)


def torchs_functional(sizes: list[int]) -> Step:
    parameters = parameters_of(sizes)
    gradients = [parameter.grad for parameter in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        from torch.distributed.optim import _FunctionalAdamW

        compiled = torch.jit.script(Compiled(_FunctionalAdamW(parameters, lr=1e-3)))
    return lambda: compiled.step(gradients)


def peers_of(name: str, sizes: list[int]) -> dict[str, Step]:
    """Steps over parameters of these sizes."""
    keys = {"lr": 1e-3, **KEYS.get(name, {})}
    peers: dict[str, Step] = {"lamina.optim": getattr(lamina.optim, name)(parameters_of(sizes), **keys).step}
    if name in FUSED_BY_TORCH:
        peers["torch.optim, fused"] = getattr(torch.optim, name)(parameters_of(sizes), fused=True, **keys).step
    if name == "AdamW":
        peers["torch's functional"] = torchs_functional(sizes)
        if importlib.util.find_spec("deepspeed"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            peers["DeepSpeed"] = DeepSpeedCPUAdam(parameters_of(sizes), lr=1e-3, adamw_mode=True).step
    return peers


def seconds_of(step: Step, rounds: int) -> float:
    """Median of a step."""
    samples = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[3:])


def main() -> None:
    options = arguments(__doc__, "program")
    torch.set_num_threads(1)
    report = Report(options.name or "optim", "A step of an optimizer, one thread, float32")
    turns = options.pick(2, 7, 15)
    rounds = options.pick(5, 15, 31)
    for name in OPTIMIZERS:
        for case, sizes in CASES.items():
            peers = peers_of(name, sizes)
            ours, kernels, memory = [], [], []
            theirs: dict[str, list[float]] = {peer: [] for peer in peers}
            for _ in range(turns):
                mine, kernel, touched = map(float, output_of(options.program, name, rounds, *sizes).split())
                ours.append(1e3 * mine)
                kernels.append(1e3 * kernel)
                memory.append(1e3 * touched)
                for peer, step in peers.items():
                    theirs[peer].append(1e3 * seconds_of(step, rounds))
            label = f"{name}, {case}"
            report.add(label, "lamina", "ms", ours, of_memory=ratio(ours, memory))
            own = theirs.pop("lamina.optim")
            report.add(label, "lamina.optim", "ms", own)
            for peer, times in theirs.items():
                report.add(label, peer, "ms", times, over=ratio(times, own))
            if name in FUSED_BY_TORCH:
                report.add(label, "its kernel from C++", "ms", kernels, over=ratio(kernels, ours))
    if not importlib.util.find_spec("deepspeed"):
        report.note("DeepSpeed is not installed, and left out")
    report.finish()


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


if __name__ == "__main__":
    main()
