# SPDX-License-Identifier: Apache-2.0
"""Trains copies of a model, or with KEYS parts of it, some of which die, and others come in their place: joining.py
[PLACE:RANK:STEP]..., with deaths of the ranks that began. PLACE is in the forward, before the update, or after it;
`leaves` is told to end before the step, `launcher` waits for the launcher to be told so. NEWCOMER says what becomes of
the first newcomer at each place. It dies or freezes at its start (init), on its way to the others (placed), or once it
has met them (entering). With EVAL the root of the model is in no training mode. With TWICE it is the second training of
the program. It may do so when it has let go of its own model (asking), or as a rank (working). Or it
differs (script, model, optimizer, config, layouts).

Writes, of those who end, their losses, the model, and how long the others stood still. While ranks are missing (of
FULL), steps take long, so that newcomers come in time. NAME stands before the numbers of ranks in what those write that
are started by hand.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import outliving
import torch
from outliving import batch, layers
from outliving_parts import made

import lamina
from lamina.elastic import kept, survivors

STEPS, ROWS = 40, 12
SELF = os.environ.get("NAME", "") + os.environ.get("RANK", "0")
BEGAN = int(os.environ.get("WORLD_SIZE", 1))
FULL = int(os.environ.get("FULL", BEGAN))
IS_NEW = "LAMINA_NEWCOMER" in os.environ
DEATHS = {tuple(each.split(":")) for each in sys.argv[1:]}  # place, rank, step
NEWCOMER = os.environ.get("NEWCOMER", "")
SLOW_S = float(os.environ.get("SLOW_S", "0.4"))
FOLDER = Path(os.environ.get("DIR", "."))
KEYS, OPTIONS = (json.loads(os.environ.get(name, "{}")) for name in ("KEYS", "OPTIONS"))
NOW = 0  # the step


def is_due(place):
    return not IS_NEW and (place, SELF, str(NOW)) in DEATHS


def die(place):
    if is_due(place):
        outliving.fall()


def hear_signals():
    if is_due("leaves"):
        os.kill(os.getpid(), signal.SIGTERM)
    if is_due("launcher"):
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
    for kind in (survivors.Survivors, kept.KeptSurvivors):
        falters_before(kind, "_go_over", "entering")
    falters_before(kept, "MovingJob", "asking")
    take_place = survivors.take_place

    def takes_place(place):
        take_place(place)
        falter("placed")

    survivors.take_place = takes_place


def falters_before(owner, name, place):
    inner = getattr(owner, name)

    def falters(*arguments):
        falter(place)
        return inner(*arguments)

    setattr(owner, name, falters)


def begun():
    """Begins a job, and makes what it trains."""
    differs = NEWCOMER if IS_NEW else ""
    if differs == "script":
        sys.modules["__main__"].__file__ = outliving.__file__
    seed = 6 if differs == "config" else 5
    own = {"ddp": True, "microbatches": ROWS // BEGAN, "seed": seed}
    lamina.init(**(own | outliving.patience(20) | KEYS))
    falter("init")
    watch_entering()
    module = layers(float(os.environ.get("DROPOUT", "0")))
    if differs == "model":
        module[0] = torch.nn.Linear(6, 9, bias=False).double()
    for part in module:
        part.register_forward_pre_hook(lambda *_: die("forward"))
    model = lamina.distribute(module)
    optimizer, schedule = made(model)
    if differs == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
    lamina.DistributedOptimizer(optimizer)
    if "EVAL" in os.environ:
        model.module.training = False
    if "TWICE" in os.environ:
        lamina.Run(model, optimizer, schedule=schedule, **OPTIONS).elastic(lambda _: None)
    if differs == "layouts":
        OPTIONS["layouts"] = [{"partitions": 1}]
    return model, optimizer, schedule


def main():
    model, optimizer, schedule = begun()
    run = lamina.Run(model, optimizer, schedule=schedule, **OPTIONS)
    losses, sizes, layouts, still = [0.0] * STEPS, [], [], []

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @run.elastic
    def train(updates):
        global NOW
        sizes.append((updates, lamina.size(), lamina.rank()))
        layouts.append((lamina.pp_size(), lamina.dp_size()))
        (FOLDER / f"trains.{SELF}").write_text(str(os.getpid()))
        ended = time.monotonic()
        for number in range(updates, STEPS):
            NOW = number
            if number == updates + 1:
                falter("working")
            optimizer.zero_grad()
            outliving.freeze(model, number)
            hear_signals()
            loss = step(batch(number).chunk(lamina.dp_size())[lamina.dp_rank()]).reduce_mean()
            every = lamina.allgather(loss.item(), lamina.DP_GROUP)
            losses[number] = sum(every) / len(every)
            die("before")
            optimizer.step()
            schedule.step()
            still.append((number, time.monotonic() - ended))
            (FOLDER / f"steps.{SELF}").touch()
            die("after")
            if lamina.size() < FULL:
                time.sleep(SLOW_S)
            ended = time.monotonic()

    found = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "sizes": sizes}
    found |= outliving.where()
    found |= {"rates": [group["lr"] for group in optimizer.param_groups], "size": lamina.size(), "is_new": IS_NEW}
    found |= {"still": still, "drawn": lamina.rng_step(), "layouts": layouts}
    torch.save(found, FOLDER / f"end.{SELF}")
    lamina.shutdown()


if __name__ == "__main__":
    main()
