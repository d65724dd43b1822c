# SPDX-License-Identifier: Apache-2.0
"""Trains with a loader of the script's, on ranks of which some die: reading.py RANK:UPDATE..., each killed once, amid
the batch of that update. KEYS are those of lamina.init, as JSON. OPTIONS are those of lamina.Run. SHUFFLES: the loader
draws its order, of one copy of the model. SLOW: seconds that an update takes while there are fewer copies than ranks at
the beginning.

Each rank writes what it has read for each update, with the loss of all copies; at the end the model.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lamina
import lamina.dist

SAMPLES, ROWS, EPOCHS = 50, 4, 3
FOLDER, FULL = Path(os.environ["OUT"]), int(os.environ["WORLD_SIZE"])


def die(update):
    for each in sys.argv[1:]:
        rank, _, fatal = each.partition(":")
        mark = FOLDER / f"died.{rank}.{fatal}"
        if (lamina.rank(), update) == (int(rank), int(fatal)) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loader():
    data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dataset = TensorDataset(torch.arange(SAMPLES), data)
    workers = int(os.environ.get("WORKERS", "0"))
    if "SHUFFLES" in os.environ:
        torch.manual_seed(7)
        return DataLoader(dataset, batch_size=ROWS, shuffle=True, num_workers=workers)
    sampler = lamina.dist.get_sampler(dataset, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=ROWS, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def main():
    keys = {"ddp": True, "microbatches": 1, "seed": 5, "timeout_s": 60} | json.loads(os.environ.get("KEYS", "{}"))
    lamina.init(**keys)
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 1))
    model = lamina.DistributedModel(layers.double())
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    read = loader()
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    run = lamina.Run(model, optimizer, loader=read, schedule=schedule, **options)

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @run.elastic
    def train(model, optimizer):
        for number, x in run.batches(epochs=EPOCHS):
            update = run.updates
            optimizer.zero_grad()
            losses = step(x)
            die(update)
            optimizer.step()
            schedule.step()
            rows = [part.numel() for part in number.tensor_split(len(losses.outputs))]
            note = {"update": update, "ranks": lamina.size(), "copy": lamina.dp_rank(), "read": number.tolist()}
            note |= {"copies": lamina.dp_size(), "losses": [each.item() for each in losses.outputs], "rows": rows}
            with (FOLDER / f"read.{os.getpid()}").open("a") as file:
                file.write(json.dumps(note) + "\n")
            time.sleep(float(os.environ.get("SLOW", "0")) if lamina.dp_size() < FULL else 0)

    assert isinstance(read.batch_sampler, torch.utils.data.BatchSampler)
    state = model.state_dict()
    torch.save(
        {"model": state, "rate": schedule.get_last_lr(), "updates": run.updates}, FOLDER / f"end.{lamina.rank()}"
    )


main()
