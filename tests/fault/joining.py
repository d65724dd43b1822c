# SPDX-License-Identifier: Apache-2.0
"""Trains copies of a model, some of which die, and others come in their place: joining.py [PLACE:RANK:STEP]..., with
deaths of the ranks that began. PLACE is in the forward, before the update, or after it; `leaves` is told to end in the
forward, `launcher` waits for the launcher to be told so. NEWCOMER says what becomes of the first newcomer at each
place. It dies or freezes at its start (init), on its way to the others (placed), once it has met them (entering), or
as a rank (working). Or it differs (script, model, optimizer, config).

Writes, of those who end, their losses, the model, and how long the others stood still. While ranks are missing, steps
take long, so that newcomers come in time.
"""

import os
import signal
import sys
import time
from pathlib import Path

import outliving
import torch
from outliving import batch, layers, made

import lamina
from lamina.elastic import survivors

STEPS, ROWS = 40, 12
SELF, FULL = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
IS_NEW = "LAMINA_NEWCOMER" in os.environ
DEATHS = {tuple(each.split(":")) for each in sys.argv[1:]}  # place, rank, step
NEWCOMER = os.environ.get("NEWCOMER", "")
SLOW_S = float(os.environ.get("SLOW_S", "0.4"))
FOLDER = Path(os.environ.get("DIR", "."))


def die(place, number):
    if IS_NEW:
        return
    if (place, str(SELF), str(number)) in DEATHS:
        outliving.fall()
    if place == "forward" and ("leaves", str(SELF), str(number)) in DEATHS:
        os.kill(os.getpid(), signal.SIGTERM)
    if place == "forward" and ("launcher", str(SELF), str(number)) in DEATHS:
        (FOLDER / "now").touch()
        time.sleep(1.0)


def falter(place):
    """The first newcomer at this rank dies there, or freezes."""
    if not IS_NEW or not NEWCOMER.endswith(f" {place}"):
        return
    note = FOLDER / f"faltered.{SELF}"
    if note.exists():
        return
    note.write_text(place)
    os.kill(os.getpid(), signal.SIGKILL if NEWCOMER.startswith("dies") else signal.SIGSTOP)


def watch_entering():
    go_over = survivors.Survivors._go_over

    def goes_over(self, session, progress):
        falter("entering")
        return go_over(self, session, progress)

    survivors.Survivors._go_over = goes_over
    take_place = survivors.take_place

    def takes_place(place):
        take_place(place)
        falter("placed")

    survivors.take_place = takes_place


def main():
    differs = NEWCOMER if IS_NEW else ""
    if differs == "script":
        sys.modules["__main__"].__file__ = outliving.__file__
    seed = 6 if differs == "config" else 5
    lamina.init(ddp=True, microbatches=ROWS // FULL, seed=seed, **outliving.patience(20))
    falter("init")
    watch_entering()
    module = layers(float(os.environ.get("DROPOUT", "0")))
    if differs == "model":
        module[0] = torch.nn.Linear(6, 9, bias=False).double()
    model = lamina.distribute(module)
    optimizer, schedule = made(model)
    if differs == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
    lamina.DistributedOptimizer(optimizer)
    run = lamina.Run(model, optimizer, schedule=schedule)
    losses, sizes, still = [0.0] * STEPS, [], []

    @lamina.step
    def step(x, number):
        die("forward", number)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @run.elastic
    def train(updates):
        sizes.append((updates, lamina.size(), lamina.rank()))
        ended = time.monotonic()
        for number in range(updates, STEPS):
            if number == updates + 1:
                falter("working")
            optimizer.zero_grad()
            loss = step(batch(number).chunk(lamina.dp_size())[lamina.dp_rank()], number).reduce_mean()
            every = lamina.allgather(loss.item(), lamina.WORLD)
            losses[number] = sum(every) / len(every)
            die("before", number)
            optimizer.step()
            schedule.step()
            still.append((number, time.monotonic() - ended))
            die("after", number)
            if lamina.size() < FULL:
                time.sleep(SLOW_S)
            ended = time.monotonic()

    found = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "sizes": sizes}
    found |= outliving.where()
    found |= {"rates": [group["lr"] for group in optimizer.param_groups], "size": lamina.size(), "is_new": IS_NEW}
    torch.save(found | {"still": still, "drawn": lamina.rng_step()}, FOLDER / f"end.{SELF}")
    lamina.shutdown()


if __name__ == "__main__":
    main()
