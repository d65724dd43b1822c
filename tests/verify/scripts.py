# SPDX-License-Identifier: Apache-2.0
"""Training scripts without faults, by name, that are equal in their layout however oddly they train.

lamina verify -n 2 tests/verify/scripts.py NAME
"""

import itertools
import queue
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import lamina

SIZE, CLASSES = 8, 4


class Block(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.linear, self.dropout, self.act = nn.Linear(SIZE, SIZE), nn.Dropout(0.1), act or nn.GELU()

    def forward(self, x):
        return x + self.dropout(self.act(self.linear(x)))


class Many(nn.Module):
    """Returns tensors of many kinds, and values that are none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x, mask=None):
        y = self.linear(x)
        negated = torch.view_as_complex(torch.stack([y, x], -1)).conj().imag
        return {
            "sum": y + negated + torch.complex(y, x).abs(),
            "mask": mask,
            "others": [x > 0, torch.arange(len(x)), x.new_empty(0, 3), y.sum(), "text", 3],
            "meta": torch.empty(2, device="meta"),
            "sparse": x.detach().to_sparse(),
        }


class Odd(nn.Module):
    """Calls modules again: without gradients, in a checkpoint, on either rank, and with what comes in another order."""

    def __init__(self):
        super().__init__()
        act = nn.GELU()
        self.here, self.many, self.again, self.kept = Block(act), Many(), Block(act), nn.Sequential(Block(), Block())
        with lamina.partition(1):
            self.slow = nn.Sequential(*[Block(act) for _ in range(4)])
            self.shared, self.there = nn.Linear(SIZE, SIZE), Block(act)
        self.act, self.head = act, nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        late = self.slow(self.here(x))
        x = self.shared(late) + self.shared(x).sin()
        many = self.many(x, mask=None)
        x = many["sum"] + many["sparse"].to_dense()
        with torch.no_grad():
            before = self.again(x)
        x = checkpoint(
            self.there, checkpoint(self.kept, self.again(x) + before, use_reentrant=False), use_reentrant=False
        )
        return self.head(self.act(x)), many["others"][3]


class Rows(Dataset):
    """Rows that a module makes."""

    def __init__(self):
        self.module = nn.Linear(SIZE, SIZE)

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return self.module(torch.full([SIZE], row / 40)).detach(), row % CLASSES


def odd():
    """Evaluates in steps of its own, draws in the body, and goes on whatever is raised."""
    lamina.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    model = lamina.DistributedModel(Odd())
    optimizer = lamina.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @lamina.step
    def train(x, target):
        output, extra = model(x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(output, target) + 0.01 * extra
        model.backward(loss)
        return loss

    @lamina.step
    def evaluate(x):
        with torch.no_grad():
            return {"output": model(x)[0], "none": None}

    for x, target in DataLoader(Rows(), batch_size=4):
        try:
            model.train()
            for part in (x, x.flip(0)):  # gradients add up
                train(part, target)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            model.eval()
            evaluate(x)
        except BaseException as error:
            print("caught", type(error).__name__, flush=True)


def again():
    """Begins a job anew after each two steps, twice, as libraries and their users both do."""
    for seed in range(3):
        for _ in range(2):
            lamina.init(partitions=2, microbatches=2)
        torch.manual_seed(seed)
        model = lamina.DistributedModel(nn.Sequential(*[Block() for _ in range(3)]))
        optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @lamina.step
        def train(x):
            loss = model(x).square().mean()  # noqa: B023 -- called before the next one is made
            model.backward(loss)  # noqa: B023
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            train(torch.randn(4, SIZE))
            optimizer.step()
        lamina.shutdown()


def adversaries():
    """Has two optimizers that take turns, without step functions, over shards."""
    lamina.init(ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=1)
    torch.manual_seed(0)
    model = lamina.DistributedModel(nn.ModuleDict({"made": Block(), "judge": nn.Linear(SIZE, 1)}))
    made, judge = model.module["made"], model.module["judge"]
    optimizers = [lamina.DistributedOptimizer(torch.optim.Adam(part.parameters(), lr=0.01)) for part in (judge, made)]
    torch.manual_seed(lamina.dp_rank())
    for _ in range(4):
        for target, optimizer in zip((1.0, 0.0), optimizers, strict=True):
            for each in optimizers:
                each.zero_grad()
            (judge(made(torch.randn(4, SIZE))) - target).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            judge(made(torch.ones(2, SIZE)))


def closure():
    """Has an optimizer whose states are lists."""
    lamina.init()
    torch.manual_seed(0)
    model = lamina.DistributedModel(Block())
    optimizer = lamina.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=2))

    def evaluated():
        optimizer.zero_grad()
        loss = model(torch.ones(2, SIZE)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(evaluated)


def fed():
    """Reads its data from a file on its input, on the rank that leads, by a thread that waits for the next step."""
    lamina.init(partitions=2, microbatches=2)
    torch.manual_seed(0)
    model = lamina.DistributedModel(nn.Sequential(*[Block() for _ in range(3)]))
    numbers = [float(word) for word in sys.stdin.read().split()] or [1.0]
    rows = queue.Queue(1)

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def feed():
        for number in itertools.cycle(numbers):
            rows.put(torch.full((4, SIZE), number))

    threading.Thread(target=feed).start()
    while True:
        train(rows.get())


def resumed():
    """Saves where there is no checkpoint, and else resumes from it: its data are drawn on."""
    lamina.init(partitions=2, microbatches=2)
    torch.manual_seed(0)
    model = lamina.DistributedModel(nn.Sequential(*[Block() for _ in range(3)]))
    optimizer = lamina.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    saves = not Path("checkpoints").exists()
    if not saves:
        lamina.resume_from_checkpoint("checkpoints", partial=True)

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2 if saves else 4):
        optimizer.zero_grad()
        train(torch.randn(4, SIZE))
        optimizer.step()
    if saves:
        lamina.save_checkpoint("checkpoints", tag="two", partial=True)


if __name__ == "__main__":
    {each.__name__: each for each in (odd, again, adversaries, closure, fed, resumed)}[sys.argv[1]]()
    print("the script has gone on")
