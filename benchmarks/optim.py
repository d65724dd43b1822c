# SPDX-License-Identifier: Apache-2.0
"""A step of each optimizer in one thread, in float32, without Python (optim_bench.cc), in turns with torch's fused one.

    python benchmarks/optim.py PATH_TO_optim_bench

`torch over lamina` is the median, over the turns, of torch's time over ours: `torch.optim(fused=True)`, called from
Python as a user does, and its kernel alone, called from C++ with lists that are made once. `of memory` is our time over
that of loops which merely read and write what the passes of the optimizer read and write.
"""

import statistics
import time

import torch
from measure import Report, arguments, output_of

OPTIMIZERS = ("AdamW", "SGD", "LAMB", "NovoGrad", "QHM")
PEERS = {"AdamW": (torch.optim.AdamW, {}), "SGD": (torch.optim.SGD, {"momentum": 0.9})}


LAYER = [parameter.numel() for parameter in torch.nn.TransformerEncoderLayer(512, 8).parameters()]
CASES = {
    "1 x 4 M": [1 << 22],
    "1000 x 1 k": [1000] * 1000,
    "transformer": [8192 * 512, *LAYER * 6],  # 23 M in six layers, 512 wide, and a vocabulary of 8192
}


class Peer:
    """torch's optimizer over parameters of these sizes, as a script has it."""

    def __init__(self, name: str, sizes: list[int]):
        parameters = [torch.randn(size, requires_grad=True) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made, options = PEERS[name]
        self._optimizer = made(parameters, lr=1e-3, fused=True, **options)

    def seconds(self, rounds: int) -> float:
        """Median of a step."""
        samples = []
        for _ in range(rounds + 3):
            begin = time.perf_counter()
            self._optimizer.step()
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
            peer = Peer(name, sizes) if name in PEERS else None
            ours, torchs, kernels, memory = [], [], [], []
            for _ in range(turns):
                mine, kernel, touched = map(float, output_of(options.program, name, rounds, *sizes).split())
                ours.append(1e3 * mine)
                kernels.append(1e3 * kernel)
                memory.append(1e3 * touched)
                if peer:
                    torchs.append(1e3 * peer.seconds(rounds))
            label = f"{name}, {case}"
            report.add(label, "lamina", "ms", ours, of_memory=ratio(ours, memory))
            if peer:
                report.add(label, "torch.optim, fused", "ms", torchs, torch_over_lamina=ratio(torchs, ours))
                report.add(label, "its kernel from C++", "ms", kernels, torch_over_lamina=ratio(kernels, ours))
    report.finish()


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


if __name__ == "__main__":
    main()
