# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers of a GPT of 25 million parameters: with a loss scale, with masters, and with states that copies
divide, beside torch's ZeroRedundancyOptimizer.

    lamina run -n 2 benchmarks/precision.py

`step` is `optimizer.step()` alone, after a barrier; `iteration` a forward and a backward of 64 rows, too. `times plain`
of a row is the median of the ratios to the same without what the row says. Bytes are those of states and masters on
this rank.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import lamina

WIDTH, LAYERS = 512, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.mix(x)[..., :WIDTH]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))


def state_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Bytes of states, and of what stands in the groups for parameters with memory of its own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    places = [place for group in optimizer.param_groups for place in group["params"]]
    masters = [place for place in places if place.untyped_storage().data_ptr() not in own]
    return sum(each.nbytes for each in (*states, *masters))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, barrier) -> tuple[float, float]:
    """Milliseconds of a step, and of a whole iteration; medians."""
    x = torch.randn(64, WIDTH, dtype=next(model.parameters()).dtype)
    taken, whole = [], []
    for _ in range(count + 1):
        barrier()
        start = time.perf_counter()
        loss = model(x).float().square().mean()
        model.backward(loss) if isinstance(model, lamina.DistributedModel) else loss.backward()
        middle = time.perf_counter()
        barrier()
        begin = time.perf_counter()
        optimizer.step()
        taken.append(1e3 * (time.perf_counter() - begin))
        whole.append(1e3 * (middle - start) + taken[-1])
        optimizer.zero_grad()
    return statistics.median(taken[1:]), statistics.median(whole[1:])


def of_lamina(count: int, scale: float = 1.0, **keys: bool) -> tuple[tuple[float, float], int]:
    lamina.init(ddp=True, **keys)
    model = lamina.distribute(network())
    optimizer = lamina.DistributedOptimizer(lamina.optim.AdamW(model.parameters()), static_loss_scale=scale)
    result = steps(model, optimizer, count, lamina.barrier), state_bytes(optimizer, model)
    lamina.shutdown()
    return result


def of_torch(count: int) -> tuple[tuple[float, float], int]:
    model = network()
    data_parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, fused=True)
    return steps(data_parallel, optimizer, count, dist.barrier), state_bytes(optimizer.optim, model)


ROWS = {
    "float32": ({}, None),
    "float32, scaled": ({"scale": 1024.0}, "float32"),
    "bf16": ({"bf16": True}, None),
    "bf16, scaled": ({"bf16": True, "scale": 1024.0}, "bf16"),
    "float32, divided": ({"shard_optimizer_state": True}, "float32"),
    "bf16, divided": ({"bf16": True, "shard_optimizer_state": True}, "bf16"),
}


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # once: another one would meet what is left of it in the store
    report = Report(options.name or "precision", "A step of AdamW, 25 M parameters, one thread a rank")
    count = options.pick(2, 5, 9)
    taken: dict[tuple[str, str], list[float]] = {}
    held: dict[str, int] = {}
    for _ in range(options.pick(1, 3, 7)):
        for name, of in [(name, of_lamina) for name in ROWS] + [("ZeroRedundancyOptimizer", of_torch)]:
            samples, held[name] = of(count, **ROWS.get(name, ({}, None))[0])
            for what, sample in zip(("step", "iteration"), samples, strict=True):
                taken.setdefault((what, name), []).append(sample)
    for (what, name), samples in taken.items():
        plain = taken[what, ROWS.get(name, ({}, "float32"))[1] or name]
        ratio = statistics.median(own / other for own, other in zip(samples, plain, strict=True))
        report.add(what, name, "ms", samples, **{"times plain": ratio, "state MiB": held[name] / 2**20})
    dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        report.finish()


if __name__ == "__main__":
    main()
