# SPDX-License-Identifier: Apache-2.0
"""Trains a model whose ranks have parts that nobody else has. Some of them die.

Its arguments are KEYS PLACE RANK[:STEP]...: keys of init() as JSON, and each rank that dies, in step 3 or another one.
PLACE is the start of the step, in its forward, the backward, before the update, in it, after it. `keeping` is before
its version is kept, `kept` after that. Or it is a time, the most milliseconds after the step began. A rank with the
step "change" dies in the change that follows, at CHANGE.

With INTO, keys of another layout as JSON, all change to that before step 2. A rank with the step "amid" dies in that:
at CHANGE, or at most so many milliseconds after it began.

Writes, of those who are left, their losses, the model with the states of its optimizer, and the layout.
"""

import json
import os
import random
import sys
import threading
from pathlib import Path

import outliving
import torch
from outliving import batch, layers
from torch import nn

import lamina
from lamina.elastic import change, kept
from lamina.job import current, lifetime
from lamina.pipeline.model_face import ModelFace

STEPS, ROWS, FATAL = 8, 12, 3
SLICES = {"0": "colwise_gather_output", "5": "rowwise_split_input"}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.005, momentum=0.5, centered=True),
}


def made(module):
    optimizer = OPTIMIZERS[os.environ.get("OPTIMIZER", "adamw")](module.parameters())
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def plain():
    """Losses and state of one process."""
    return outliving.plain(STEPS, made)


SELF, NOW = int(os.environ.get("RANK", 0)), -1
PLACE, DEATHS = "", {}  # rank of the beginning: step, or "change"


def end_here():
    from victim import note  # beside this program; who takes `plain` alone may lack it

    note(f"death-{SELF}", "")
    outliving.fall()


def die(place):
    if place == PLACE and DEATHS.get(SELF) == str(NOW):
        end_here()


def die_by_time(step):
    """Dies while this step runs, or when the next one begins."""
    if PLACE.isdigit() and DEATHS.get(SELF) == str(step):
        threading.Timer(random.random() * int(PLACE) / 1000, end_here).start()
    if PLACE.isdigit() and DEATHS.get(SELF) == str(step - 1):
        end_here()


def dies_in_change(owner, name):
    function = getattr(owner, name)

    def dying(*args, **kwargs):
        end_here()
        return function(*args, **kwargs)

    setattr(owner, name, dying)


def die_in_change():
    """Dies in a change at CHANGE."""
    place = os.environ["CHANGE"]
    if place == "meeting":
        dies_in_change(kept.KeptSurvivors, "take_place")
    elif place == "holding":
        dies_in_change(kept.KeptSurvivors, "_go_over")
    elif place == "ending":
        dies_in_change(lifetime, "go_over")
    elif place == "cutting":
        dies_in_change(ModelFace, "take_cut")
    elif place == "loading":
        dies_in_change(ModelFace, "load")
    elif place == "keeping":
        go_over = kept.KeptSurvivors._go_over

        def dying(*args):
            dies_in_change(kept.KeptSurvivors, "_keep_now")
            go_over(*args)

        kept.KeptSurvivors._go_over = dying


AMID = {  # places in lamina.change(), after which each dies
    "asked": (change, "checked"),
    "listing": (change.MovingJob, "tensors"),
    "held": (change, "everywhere"),
    "opened": (change, "_go_over"),
    "let go": (lifetime, "go_over"),
    "ended": (current, "begin"),
    "cutting": (ModelFace, "take_cut"),
    "trimming": (ModelFace, "trim_optimizers"),
    "loading": (ModelFace, "load"),
    "settling": (ModelFace, "settle"),
}


def own_layers():
    """With FIRST the first rank alone has the values that count."""
    module = layers(float(os.environ.get("DROPOUT", "0")))
    for parameter in module.parameters() if "FIRST" in os.environ and SELF != 0 else []:
        parameter.data.fill_(SELF)
    return module


def change_layout():
    place = os.environ.get("CHANGE", "")
    if DEATHS.get(SELF) == "amid" and place.isdigit():
        threading.Timer(random.random() * int(place) / 1000, end_here).start()
    elif DEATHS.get(SELF) == "amid" and place in AMID:
        dies_in_change(*AMID[place])
    lamina.change(**json.loads(os.environ["INTO"]))
    if DEATHS.get(SELF) == "amid":
        end_here()


def sees(_, inputs, output):
    die("forward")
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda _: die("backward"))


def keeping(function):
    def keep(self):
        die("keeping")
        function(self)
        die("kept")

    return keep


def main():
    global NOW
    keys = json.loads(sys.argv[1])
    os.environ["WORLD"] = os.environ["WORLD_SIZE"]  # of the beginning
    kept.KeptSurvivors._keep_now = keeping(kept.KeptSurvivors._keep_now)
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    lamina.init(**({"ddp": True, "timeout_s": float(os.environ.get("TIMEOUT", "30")), "seed": 5} | keys))
    module = own_layers()
    if "DTYPE" in os.environ:
        module = module.to(getattr(torch, os.environ["DTYPE"]))
    for part in module.modules():
        if not isinstance(part, nn.Sequential):
            part.register_forward_hook(sees)
    lamina.set_tensor_parallelism(module, plan=SLICES)
    model = lamina.distribute(module)
    dtype = next(model.parameters()).dtype
    optimizer, schedule = made(model)
    optimizer.register_step_pre_hook(lambda *_: die("update"))
    lamina.DistributedOptimizer(optimizer)
    run = lamina.Run(model, optimizer, schedule=schedule, **options)
    losses, begun = [0.0] * STEPS, []
    group, rank, size = lamina.DP_GROUP, lamina.dp_rank, lamina.dp_size  # whose ranks read batches of their own
    if keys.get("prescaled_batch"):
        group, rank, size = lamina.RDP_GROUP, lamina.rdp_rank, lamina.rdp_size

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @run.elastic
    def train(updates):
        global NOW
        begun.append(updates)
        for number in range(updates, STEPS):
            NOW = number
            die("start")
            die_by_time(number)
            if DEATHS.get(SELF) == "change" and number == FATAL:
                die_in_change()
            optimizer.zero_grad()
            if number == 2 and "INTO" in os.environ and lamina.size() == int(os.environ["WORLD"]):
                change_layout()
            x = batch(number).to(dtype).chunk(size())[rank()]
            loss = step(x).reduce_mean()
            every = lamina.allgather(loss.item(), group)
            losses[number] = sum(every) / len(every)
            die("before")
            optimizer.step()
            schedule.step()
            die("after")

    found = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found |= {"rates": schedule.get_last_lr(), "size": lamina.size(), "partitions": lamina.pp_size()}
    found |= {"updates": begun, "copies": lamina.dp_size(), "sent": getattr(run._survivors._engine, "sent_bytes", 0)}
    torch.save(found, Path(os.environ["DIR"], f"end.{SELF}"))
    lamina.shutdown()


if __name__ == "__main__":
    PLACE = sys.argv[2]
    DEATHS = {int(rank): step or str(FATAL) for rank, _, step in (each.partition(":") for each in sys.argv[3:])}
    main()
