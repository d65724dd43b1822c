# SPDX-License-Identifier: Apache-2.0
"""Trains copies of a model, or parts of it, by a Trainer, some of which die: outliving_trainer.py WAY PLACE
RANK[:BATCH[:PLACE]]..., with the ranks, and the batches that they die in, or after. PLACE is an event, or one of these:
forward, gradient, update, updated, behind (an update that another one has lost), evaluation. `keeping` and `kept` are
before a version and after it. `change` is one of the layout, `changing` once all have met in the other one, `beginning`
when the old one is gone. Then come `cutting`, `loading` and `reading on`. `meeting` is the end of a call of the
Trainer's, `left` what follows. `saving` is before the part of a save that all make together, `saved` after that,
`going on` is without another one. `error` raises in the place of a death, `leaves` is told to end.

Writes, of those who are left, what they have heard and computed, and how long it took from a death to the next batch.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lamina
from lamina.elastic import change, kept, survivors
from lamina.job import current
from lamina.pipeline.model_face import ModelFace
from lamina.trainer import Callback, ComposerModel, Event, Trainer, checkpoints, layouts, survival
from lamina.trainer.schedulers import LinearScheduler

FATAL = 3
EPOCH = 6  # batches, of which the last has half as many samples
BATCHES = {2: 6, 3: 9, 4: 8, 5: 10}  # of all of so many copies; those that are left share them unevenly

DEATHS, PLACES = {}, {}  # by the rank of the beginning: batch, and the place where it is another one
PLACE, SELF, NOW = "", int(os.environ.get("RANK", 0)), -1
CALLS = {"fit": 0, "eval": 100, "predict": 200, "close": 300}  # what numbers of batches in them count from
CALL = "fit"


def die(place):
    if place == (PLACES.get(SELF) or PLACE) and DEATHS.get(SELF) == NOW:
        from victim import note  # beside this program; who takes `trainer_of` alone may lack it

        note(f"death-{SELF}", "")
        os.kill(os.getpid(), signal.SIGKILL)


class Net(ComposerModel):
    """Counts batches in a buffer, and draws numbers."""

    def __init__(self, dropout, is_measured):
        super().__init__()
        self.is_measured = is_measured
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        ).double()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))
        lamina.set_tensor_parallelism(self, plan={"layers.0": "colwise", "layers.3": "rowwise"})
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, _: die("forward" if layer.training else "evaluation"))
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: die("gradient"))

    def forward(self, batch):
        if self.training:
            self.forwards += 1 / lamina.num_microbatches()
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1], reduction="none")

    def get_metrics(self, is_train=False):
        if not self.is_measured or not is_train:
            return {}
        from torchmetrics.classification import MulticlassAccuracy  # takes four seconds

        return {"MulticlassAccuracy": MulticlassAccuracy(3, average="micro")}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1), batch[1])


class Watches(Callback):
    """Notes what each batch is of, by its number: the last time counts."""

    def __init__(self, changes=None):
        self.changes = dict(changes or {})
        self.times = {}  # how often each event was heard
        self.losses, self.read, self.rates, self.metrics, self.layouts, self.went_on = {}, {}, {}, {}, [], []

    def run_event(self, event, state, logger):
        global NOW
        number = int(state.timestamp.batch)
        NOW = CALLS[CALL] + number
        die(event.value)
        if event is Event.BATCH_START and PLACES.get(SELF) == "error" and DEATHS[SELF] == number:
            raise ValueError("of the program")
        if event is Event.BATCH_START and PLACES.get(SELF) == "leaves" and DEATHS[SELF] == number:
            from victim import note

            note(f"death-{SELF}", "")
            os.kill(os.getpid(), signal.SIGTERM)
        self.times[event.value, number] = self.times.get((event.value, number), 0) + 1
        if event is Event.BATCH_START:
            reads = state.batch is not None and lamina.tp_rank() == 0  # the others with slices read the same
            own = state.batch[2].tolist() if reads else []
            theirs = lamina.allgather(own, lamina.WORLD)
            self.read[number] = sorted(sample for each in theirs for sample in each)
            self.rates[number] = state.optimizers[0].param_groups[0]["lr"]
        if event is Event.BATCH_END:
            self.losses[number] = float(state.total_loss_dict["loss/train/total"])
            self.metrics[number] = state.train_metric_values.get("MulticlassAccuracy", 0.0)
        if event is Event.LAYOUT_CHANGE:
            self.layouts.append((number, lamina.size(), lamina.rank()))
            self.went_on.append(time.time())
        if event is Event.BATCH_END and number in self.changes:
            with contextlib.suppress(lamina.ConfigError, lamina.UsageError):  # fewer ranks may not have that layout
                lamina.change(**self.changes[number])


def dataset(samples):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (samples,), generator=draw), torch.arange(samples))


class Stream(IterableDataset):
    """Reads of itself what its copy of the model is to have."""

    def __init__(self, data, copy, of):
        self.data, self.copy, self.of = data, copy, of

    def __iter__(self):
        return (self.data[number] for number in range(self.copy, len(self.data), self.of))


def evaluator():
    data = dataset(9)
    return DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))


# Ways to train: the dropout, whether copies read rows, how batches are cut, and the layout.
WAYS = {
    "plain": {},
    "workers": {"workers": 2},
    "rows": {"dropout": 0.4, "in_rows": True, "device_train_microbatch_size": 1},
    "cut": {"grad_accum": 2},
    "rows cut": {"dropout": 0.4, "in_rows": True, "grad_accum": 2, "times": 2},
    "rows uneven": {"dropout": 0.4, "in_rows": True, "is_partial": True, "grad_accum": 2},
    "rows with gaps": {"dropout": 0.4, "in_rows": True, "is_partial": True, "grad_accum": 4, "times": 3},
    "torchdata": {"is_torchdatas": True},
    "measured": {"is_measured": True},
    "memory": {"device_train_microbatch_size": "auto"},
    "stream": {"is_stream": True},
    "partitions": {"keys": {"partitions": 4}, "grad_accum": 2, "dropout": 0.4},
    "partitions 5": {"keys": {"partitions": 5}, "grad_accum": 2},
    "itself": {"keys": {"partitions": 4}, "grad_accum": 2, "reads_itself": True},
    "groups": {"keys": {"partitions": 2}, "grad_accum": 2},
    "shards": {"keys": {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0}},
    "units": {"fsdp_config": {"min_params": 20}},
    "divided": {"keys": {"shard_optimizer_state": True}},
    "slices": {"keys": {"tensor_parallel_degree": 2, "prescaled_batch": True}, "grad_accum": 2},
    "changes": {"changes": {FATAL: {"shard_optimizer_state": True}}},
    "to partitions": {"changes": {FATAL: {"partitions": 2}}, "grad_accum": 2},
    "to copies": {"keys": {"partitions": 4}, "grad_accum": 2, "changes": {FATAL: {"partitions": 1}}},
}


def trainer_of(way, copies, batch, folder=None):
    """A Trainer of which so many copies share a batch of so many samples, and what it trains."""
    given, is_many = dict(WAYS[way]), copies > 1
    batch *= given.pop("times", 1)
    model = Net(given.pop("dropout", 0.0), given.pop("is_measured", False))
    in_rows, workers = given.pop("in_rows", False), given.pop("workers", 0)
    is_partial = given.pop("is_partial", not in_rows)
    data, watches = dataset(EPOCH * batch - is_partial * (batch // 2)), Watches(given.pop("changes", None))
    if not is_many:
        watches.changes = {}
        if way == "rows cut":
            given["grad_accum"] = batch // 2  # those of all copies, of two samples
        given.pop("keys", {}), given.pop("fsdp_config", {})
    keys = given.get("keys", {})
    copies = copies // (keys.get("partitions", 1) * keys.get("tensor_parallel_degree", 1)) or 1
    rows = batch // copies
    exact = {"exact": True, "batch_size": rows} if in_rows else {}
    sampler = lamina.dist.get_sampler(data, shuffle=True, seed=2, **exact)
    loader = DataLoader(data, rows, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    if given.pop("is_torchdatas", False):
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(data, rows, sampler=sampler)
    if given.pop("reads_itself", False):
        loader = DataLoader(data, rows, shuffle=True)
    if given.pop("is_stream", False):
        loader = DataLoader(Stream(data, SELF, copies), rows)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
    every = os.environ.get("EVERY", "1")
    given["elastic_config"] = {"keep_every": int(every) if every != "auto" else every}
    given["elastic_config"] |= {"layouts": json.loads(os.environ.get("LAYOUTS", "[]"))}
    if folder is not None:
        given |= {
            "save_folder": folder,
            "save_interval": os.environ.get("SAVE_EVERY", "1ba"),
            "save_filename": "ba{batch}",
        }
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=loader,
        schedulers=LinearScheduler(t_max="12ba"),
        max_duration="2ep",
        seed=7,
        progress_bar=False,
        eval_dataloader=evaluator(),
        eval_interval="3ba",
        callbacks=watches,
        lamina_config={"timeout_s": 30, **given.pop("keys", {})} if is_many else {},
        **given,
    )
    return trainer, model, optimizer, watches


def calling(name):
    global CALL, NOW
    CALL = name
    NOW = CALLS[name] + 2 * EPOCH


def trained(trainer, model, optimizer, watches):
    """Trains, and returns what it has come to."""
    rows = trainer.state.train_dataloader.batch_size
    for _ in range(int(os.environ.get("FITS", "1"))):
        trainer.fit(duration="1ep" if "FITS" in os.environ else None)
    found = {"eval": trainer.state.eval_metric_values["loss"]}
    if "CALLS" in os.environ:
        calling("eval")
        trainer.eval(evaluator())
        found["eval"] = trainer.state.eval_metric_values["loss"]
        calling("predict")
        found["predicted"] = trainer.predict(evaluator())
        calling("close")
    size = lamina.size() if lamina.is_initialized() else 1
    trainer.close()
    found |= {"size": watches.layouts[-1][1] if watches.layouts else size, "saved": trainer.saved_checkpoints}
    found["events"] = len(watches.layouts)
    loader = trainer.state.train_dataloader
    batches = loader.batch_sampler
    found["is_scripts_own"] = (loader.batch_size, batches.batch_size, batches.sampler) == (rows, rows, loader.sampler)
    return found | {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]} | vars(watches)


def dies_before(owner, name, place):
    inner = getattr(owner, name)

    def dying(*arguments, **keywords):
        die(place)
        return inner(*arguments, **keywords)

    setattr(owner, name, dying)


def dies_after(owner, name, place):
    inner = getattr(owner, name)

    def dying(*arguments, **keywords):
        found = inner(*arguments, **keywords)
        die(place)
        return found

    setattr(owner, name, dying)


def is_behind():
    """One of two that are left has lost the victim before the update that the other has made."""
    (optimizer,) = current.job().optimizers
    update, victim = optimizer._lent.update, min(DEATHS)

    def loses_it(*arguments):
        if PLACE == "behind" and DEATHS[victim] == NOW and int(os.environ["BEHIND"]) == SELF:
            optimizer._lent.update = update
            assert current.session().loss(victim, 20)
            raise lamina.PeerError("a rank is lost before the update")
        die("update")
        update(*arguments)
        die("updated")
        die("behind")

    optimizer._lent.update = loses_it


def main():
    copies = int(os.environ["WORLD_SIZE"])
    trainer, *rest = trainer_of(sys.argv[1], copies, BATCHES[copies], os.environ.get("SAVES"))
    is_behind()
    dies_before(checkpoints, "save_checkpoint", "saving")
    dies_after(checkpoints, "save_checkpoint", "saved")
    dies_before(survival.Survival, "_meet_at_end", "meeting")
    dies_after(survival.Survival, "_meet_at_end", "left")
    dies_before(change, "everywhere", "change")
    dies_before(change, "_go_over", "changing")
    dies_before(current, "begin", "beginning")
    dies_before(ModelFace, "take_cut", "cutting")
    dies_before(ModelFace, "load", "loading")
    dies_before(layouts.Layouts, "_read_on", "reading on")
    dies_before(survivors.Survivors, "_go_over", "going on")
    dies_before(kept.KeptSurvivors, "_keep_now", "keeping")
    dies_after(kept.KeptSurvivors, "_keep_now", "kept")
    dies_before(kept.KeptSurvivors, "_go_over", "going on")
    found = trained(trainer, *rest)
    torch.save(found, Path(os.environ["DIR"], f"end.{SELF}"))


if __name__ == "__main__":
    PLACE = sys.argv[2]
    for each in sys.argv[3:]:
        rank, batch, place = [*each.split(":"), "", ""][:3]
        DEATHS[int(rank)], PLACES[int(rank)] = int(batch or FATAL), place
    main()
