# SPDX-License-Identifier: Apache-2.0
"""The step of a tiny model by the Trainer, beside the same loop by hand, in turns in one run.

    lamina run -n 1 benchmarks/trainer.py            # or -n 2: a loop by hand with lamina and one with DDP

Batches of 8 by a DataLoader, 2 linear layers of 16, SGD, the loss is read after each step. A sample is the time of a
block of steps by their number:
  torch by hand    one rank: torch alone; several: DistributedDataParallel
  lamina by hand   a step function, DistributedModel and DistributedOptimizer
  Trainer          lamina.Trainer without a bar
  Fabric, Accelerate   where they are installed, on one rank
"""

import importlib.util
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from measure import Options, Report, arguments
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lamina
from lamina.trainer import Callback, ComposerModel, Trainer

BATCH, WIDTH = 8, 16


class Tiny(ComposerModel):
    """Two layers and their loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1])


def loader_of(steps: int, exact: bool = False) -> DataLoader:
    """A loader of at least so many batches of this rank."""
    samples = BATCH * (steps + 1) * lamina.dist.get_world_size()
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, 4, (samples,)))
    if lamina.dist.get_world_size() == 1:
        return DataLoader(data, BATCH)
    sampler = lamina.dist.get_sampler(data) if exact else DistributedSampler(data)
    return DataLoader(data, BATCH, sampler=sampler)


def timed(train: Callable[[object], None], batches: Iterator[object], steps: int) -> float:
    """Microseconds of a step, of which the first is not counted."""
    train(next(batches))
    begin = time.perf_counter()
    for _ in range(steps):
        train(next(batches))
    return 1e6 * (time.perf_counter() - begin) / steps


def by_torch(steps: int) -> float:
    """The loop by hand."""
    model = Tiny()
    inner = model
    if dist.is_initialized():
        inner = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train(batch):
        optimizer.zero_grad()
        loss = model.loss(inner(batch), batch)
        loss.backward()
        optimizer.step()
        loss.item()

    return timed(train, iter(loader_of(steps)), steps)


def by_lamina(steps: int) -> float:
    """The loop by hand with lamina."""
    lamina.init(ddp=True)
    plain = Tiny()
    model = lamina.DistributedModel(plain)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))

    @lamina.step
    def step(batch):
        loss = plain.loss(model(batch), batch)
        model.backward(loss)
        return loss

    def train(batch):
        optimizer.zero_grad()
        loss = step(batch)
        optimizer.step()
        loss.reduce_mean().item()

    try:
        return timed(train, iter(loader_of(steps)), steps)
    finally:
        lamina.shutdown()


class Clock(Callback):
    """The times at which batches end."""

    def __init__(self):
        self.ends = []

    def batch_end(self, state, logger):
        self.ends.append(time.perf_counter())


def by_trainer(steps: int) -> float:
    """The Trainer."""
    model, clock = Tiny(), Clock()
    trainer = Trainer(
        model=model,
        train_dataloader=loader_of(steps, exact=True),
        max_duration=f"{steps + 1}ba",
        optimizers=torch.optim.SGD(model.parameters(), 0.01),
        callbacks=clock,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return 1e6 * (clock.ends[-1] - clock.ends[0]) / steps


def by_fabric(steps: int) -> float:
    """Lightning's Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain = Tiny()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.01))

    def train(batch):
        optimizer.zero_grad()
        loss = plain.loss(model(batch), batch)
        fabric.backward(loss)
        optimizer.step()
        loss.item()

    return timed(train, iter(fabric.setup_dataloaders(loader_of(steps))), steps)


def by_accelerate(steps: int) -> float:
    """Hugging Face's Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = Tiny()
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.01), loader_of(steps))

    def train(batch):
        optimizer.zero_grad()
        loss = plain.loss(model(batch), batch)
        accelerator.backward(loss)
        optimizer.step()
        loss.item()

    return timed(train, iter(loader), steps)


def loops() -> dict[str, Callable[[int], float]]:
    """All loops, that by hand first."""
    every = {"torch by hand": by_torch, "lamina by hand": by_lamina, "Trainer": by_trainer}
    if lamina.dist.get_world_size() > 1:
        return every
    peers = {"Fabric": ("lightning_fabric", by_fabric), "Accelerate": ("accelerate", by_accelerate)}
    return every | {name: loop for name, (module, loop) in peers.items() if importlib.util.find_spec(module)}


def measure(options: Options) -> None:
    """Runs all in turns."""
    steps, ranks = options.pick(50, 300, 500), lamina.dist.get_world_size()
    samples: dict[str, list[float]] = {}
    for _ in range(options.pick(2, 7, 15)):
        for name, loop in loops().items():
            samples.setdefault(name, []).append(loop(steps))
    report = Report(options.name or f"trainer_{ranks}", f"A step of a tiny model, {ranks} rank{'s' * (ranks > 1)}")
    by_hand = report.add("step", "torch by hand", "us", samples.pop("torch by hand"))
    for name, values in samples.items():
        above = sorted(values)[len(values) // 2] - by_hand
        report.add("step", name, "us", values, above=above, ratio=(above + by_hand) / by_hand)
    if lamina.dist.get_global_rank() == 0:
        report.finish()


def main() -> None:
    """Measures."""
    options = arguments(__doc__)
    if lamina.dist.get_world_size() > 1:
        dist.init_process_group("gloo")
    measure(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
