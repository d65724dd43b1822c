# SPDX-License-Identifier: Apache-2.0
"""Trains copies of a model, some of which die: outliving.py PLACE RANK[:STEP]..., with the ranks, and the steps that
they die in. PLACE is in the forward, before the update, after it, or after one that another copy has lost (behind).
At the start, before it has met the others, one dies once, with the step -1. With LOOP the loop has a GradScaler, which
leaves a step out, and draws numbers of its own.
With STOPS they stop instead, as by SIGSTOP; with STUCK a thread of theirs hangs there. With BUSY they are busy for so
many seconds, in Python or in an operator (BUSY_IN). PLACE may be slow: steps take STEP_S seconds. SLOW is what they
take after a loss.

Writes, of those who are left, their losses, the model, and how long it took from a death to the end of the next step.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import lamina
from lamina.job import current

STEPS, ROWS, FATAL = 9, 12, 3


class Counts(nn.Module):
    """Counts steps in a buffer, of which each microbatch is a part."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.steps += 1 / (lamina.num_microbatches() if lamina.is_initialized() else 1)
        die("forward")
        return x


def layers(dropout):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), Counts(), nn.Dropout(dropout), nn.Linear(9, 1))
    return module.double()


def batch(number):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def made(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def freeze(module, number):
    """With FREEZES the first parameter has no gradients from the second step on."""
    if "FREEZES" in os.environ and number == 1:
        next(module.parameters()).requires_grad_(False)


def plain(steps=STEPS, made=made):
    """Losses and state of one process, whose optimizer and schedule are `made`."""
    module = layers(0.0)
    optimizer, schedule = made(module)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        freeze(module, number)
        loss = module(batch(number)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
    return losses, module.state_dict(), optimizer.state_dict()


DEATHS = {}  # rank of the beginning: step
PLACE, SELF, NOW = "", int(os.environ.get("RANK", 0)), -1
FULL = int(os.environ.get("WORLD_SIZE", 1))


def die(place):
    if place == PLACE and DEATHS.get(SELF) == NOW:
        from victim import note  # beside this program; who takes `plain` alone may lack it

        if place == "start" and Path(os.environ["DIR"], f"death--1.{SELF}").exists():
            return None
        note(f"death-{NOW}", "")
        if "BUSY" in os.environ:
            return be_busy(float(os.environ["BUSY"]), os.environ["BUSY_IN"])
        fall()
        print("goes on", flush=True)


def fall():
    if "STUCK" in os.environ:
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGSTOP if "STOPS" in os.environ else signal.SIGKILL)


def be_busy(seconds, where):
    """Keeps the interpreter's lock all the time, or none of it."""
    by = time.monotonic() + seconds
    while time.monotonic() < by:
        if where == "python":
            pow(7, 1 << 21)  # a tenth of a second or more, in one instruction
        else:
            torch.mm(*torch.ones(2, 600, 600).unbind())


def bits(optimizer):
    """Copies of what it updates, which with HALF are masters, and of their states."""
    members = optimizer.param_groups[0]["params"]
    tensors = members + [value for each in members for value in optimizer.state[each].values()]
    return [tensor.clone() for tensor in tensors]


def loses_rank_1(_):
    """Takes the place of an update that rank 1 has made."""
    del current.job().optimizers[0]._lent.update
    assert current.session().loss(1, 20)
    raise lamina.PeerError("rank 1 is lost before the update")


def patience(timeout_s=30):
    given = {"timeout_s": float(os.environ.get("TIMEOUT", timeout_s))}
    return given | ({"silent_s": float(os.environ["SILENT"])} if "SILENT" in os.environ else {})


def where():
    """Its place, and the ranks of its machine."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {"place": {name: os.environ[name] for name in names}, "node": current.session().group_members("node")}


def main():
    global NOW
    die("start")
    half = bool(os.environ.get("HALF"))
    microbatches = int(os.environ.get("MICROBATCHES", ROWS // FULL))
    lamina.init(ddp=True, microbatches=microbatches, seed=5, bf16=half, **patience())
    model = lamina.distribute(layers(float(os.environ.get("DROPOUT", "0"))))
    optimizer, schedule = made(model)
    lamina.DistributedOptimizer(optimizer)
    scaler = lamina.amp.GradScaler(growth_interval=2, enabled="LOOP" in os.environ)
    run = lamina.Run(model, optimizer, schedule=schedule, stateful=[scaler])
    losses, went_on = [0.0] * STEPS, []
    last = (0, [])  # updates, and bits after them

    @lamina.step
    def step(x):
        loss = model(x.bfloat16() if half else x).square().mean()
        model.backward(scaler.scale(loss * float("inf") if "LOOP" in os.environ and NOW == 1 else loss))
        return loss

    @run.elastic
    def train(updates):
        global NOW
        nonlocal last
        if last[0] == updates:
            for before, now in zip(last[1], bits(optimizer) if updates else [], strict=True):
                assert torch.equal(before, now)
        for number in range(updates, STEPS):
            NOW = number
            optimizer.zero_grad()
            drawn = torch.rand(()) if "LOOP" in os.environ else 1.0
            loss = step(drawn * batch(number).chunk(lamina.dp_size())[lamina.dp_rank()]).reduce_mean()
            every = lamina.allgather(loss.item(), lamina.WORLD)
            losses[number] = sum(every) / len(every)
            scaler.unscale_(optimizer)
            die("before")
            if PLACE == "behind" and SELF == 0 and number == FATAL and lamina.size() == 3:
                current.job().optimizers[0]._lent.update = loses_rank_1
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            last = (number + 1, bits(optimizer))
            die("after" if PLACE != "behind" else "behind")
            if number == updates and updates:
                went_on.append(time.time())
            if PLACE == "slow":
                Path(os.environ["DIR"], f"steps.{SELF}").touch()
            time.sleep(float(os.environ.get("SLOW" if lamina.size() < FULL else "STEP_S", "0")))

    found = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "went_on": went_on}
    found |= {"rates": schedule.get_last_lr(), "size": lamina.size(), **where(), "scale": scaler.get_scale()}
    torch.save(found, Path(os.environ["DIR"], f"end.{SELF}"))
    lamina.shutdown()


if __name__ == "__main__":
    PLACE = sys.argv[1]
    DEATHS = {int(rank): int(step or FATAL) for rank, _, step in (each.partition(":") for each in sys.argv[2:])}
    main()
