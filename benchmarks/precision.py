# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers of a GPT of 25 million parameters: with a loss scale, with masters, and with states that copies
divide, beside torch's ZeroRedundancyOptimizer.

    lamina run -n 2 benchmarks/precision.py

`times plain` of a row is the median of the ratios to the same step without what the row says. Bytes are those of states
and masters on this rank. The gradients are there: only `step()` is measured, after a barrier.
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


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, barrier) -> list[float]:
    """Milliseconds of steps with the gradients of one backward."""
    x = torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)
    taken = []
    for _ in range(count + 1):
        loss = model(x).float().square().mean()
        model.backward(loss) if isinstance(model, lamina.DistributedModel) else loss.backward()
        barrier()
        begin = time.perf_counter()
        optimizer.step()
        taken.append(1e3 * (time.perf_counter() - begin))
        optimizer.zero_grad()
    return taken[1:]


def of_lamina(count: int, scale: float = 1.0, **keys: bool) -> tuple[list[float], int]:
    lamina.init(ddp=True, **keys)
    model = lamina.distribute(network())
    optimizer = lamina.DistributedOptimizer(lamina.optim.AdamW(model.parameters()), static_loss_scale=scale)
    result = steps(model, optimizer, count, lamina.barrier), state_bytes(optimizer, model)
    lamina.shutdown()
    return result


def of_torch(count: int) -> tuple[list[float], int]:
    dist.init_process_group("gloo")
    model = network()
    data_parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, fused=True)
    result = steps(data_parallel, optimizer, count, dist.barrier), state_bytes(optimizer.optim, model)
    dist.destroy_process_group()
    return result


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
    report = Report(options.name or "precision", "A step of AdamW, 25 M parameters, one thread a rank")
    count = options.pick(2, 5, 9)
    taken: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    for _ in range(options.pick(1, 3, 7)):
        for name, (keys, _) in ROWS.items():
            samples, held[name] = of_lamina(count, **keys)
            taken.setdefault(name, []).append(statistics.median(samples))
        samples, held["ZeroRedundancyOptimizer"] = of_torch(count)
        taken.setdefault("ZeroRedundancyOptimizer", []).append(statistics.median(samples))
    for name, samples in taken.items():
        plain = taken[ROWS.get(name, ({}, "float32"))[1] or name]
        ratio = statistics.median(own / other for own, other in zip(samples, plain, strict=True))
        report.add("step", name, "ms", samples, **{"times plain": ratio, "state MiB": held[name] / 2**20})
    if os.environ.get("RANK", "0") == "0":
        report.finish()


if __name__ == "__main__":
    main()
