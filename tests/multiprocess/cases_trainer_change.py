# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: a Trainer whose layout changes while it trains has the numbers of one process."""

import functools
import random
import signal

import pytest
import torch
from equivalence.random_sides import world_of_one
from equivalence.trainer_cases import TrainerCase, check, data_of
from multiprocess.cases_checkpoints import folder
from soak import some
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lamina
from lamina.errors import ConfigError, UsageError
from lamina.trainer import Algorithm, Callback, ComposerModel, Event, Trainer
from lamina.trainer.schedulers import LinearScheduler

SAMPLES, BATCH = 44, 8  # of all copies; the last batch of an epoch has four
EPOCH = 6  # batches


class Net(ComposerModel):
    """Has a buffer that steps count in, and one that no state dict has."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        ).double()
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float64), persistent=False)
        lamina.set_tensor_parallelism(self, plan={"layers.0": "colwise", "layers.3": "rowwise"})

    def forward(self, batch):
        return self.layers(batch[0]) * self.scale

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1], reduction="none")


class Watches(Callback):
    """Notes what each batch is of, and asks for other layouts: after these batches of the training, in this event."""

    def __init__(self, changes=None, event=Event.BATCH_END):
        self.changes, self.event = dict(changes or {}), event
        self.losses, self.read, self.rates, self.events, self.layouts = [], [], [], [], []

    def run_event(self, event, state, logger):
        self.events.append(event)
        number = int(state.timestamp.batch)
        if event is Event.BATCH_START:
            own = [] if state.batch is None else state.batch[2].tolist()
            theirs = lamina.allgather((own if lamina.mp_rank() == 0 else []), lamina.WORLD)
            self.read.append(sorted(sample for each in theirs for sample in each))
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        if event is Event.BATCH_END:
            self.losses.append(float(state.total_loss_dict["loss/train/total"]))
        if event is Event.LAYOUT_CHANGE:
            self.layouts.append((number, lamina.dp_size(), lamina.dp_rank()))
        if event is self.event and number in self.changes:
            lamina.change(**self.changes.pop(number))


def dataset(samples=SAMPLES):
    x, y = data_of(samples, 1).tensors
    return TensorDataset(x, y, torch.arange(samples))


def trainer_of(watches, copies=4, keys=None, dropout=0.0, rows=None, loader=None, workers=0, **options):
    """A Trainer of which so many copies share a batch; `rows`: samples in a row for each, in full batches."""
    model, data = Net(dropout), dataset(EPOCH * BATCH if rows else SAMPLES)
    sampler = lamina.dist.get_sampler(
        data, shuffle=True, seed=2, **({"exact": True, "batch_size": rows} if rows else {})
    )
    workers = {"num_workers": workers, "persistent_workers": workers > 0}
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
    given = {"max_duration": "2ep", "schedulers": LinearScheduler(t_max="2ep"), "seed": 7, "progress_bar": False}
    given["train_dataloader"] = (
        DataLoader(data, BATCH // copies, sampler=sampler, **workers) if loader is None else loader
    )
    given |= {"lamina_config": {"timeout_s": 60} | (keys or {}), "callbacks": watches}
    return Trainer(model=model, optimizers=optimizer, **given | options), model, optimizer


def ended(trainer, model, optimizer, watches):
    trainer.fit()
    trainer.close()
    return watches, model.state_dict(), optimizer.state_dict()["state"]


def alone(**options):
    """By one process."""
    watches = Watches()
    with world_of_one():
        return ended(*trainer_of(watches, copies=1, **options), watches)


def require_as(expected, found, tolerance=1e-12):
    (one, state, states), (several, other, others) = expected, found
    assert several.read == one.read, f"{several.read}, and not {one.read}"
    for mine, its in ((several.losses, one.losses), (several.rates, one.rates)):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=tolerance, atol=tolerance)
    assert state.keys() == other.keys() and states.keys() == others.keys()
    pairs = [(other[name], value) for name, value in state.items()]
    pairs += [(others[number][key], value) for number, each in states.items() for key, value in each.items()]
    for mine, its in pairs:
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def whole(partitions=1, **keys):
    return {"partitions": partitions, "sharded_data_parallel_degree": 1, "shard_optimizer_state": False} | keys


def sharded(degree, partitions=1):
    return whole(partitions, sharded_data_parallel_degree=degree, sdp_param_persistence_threshold=0)


def divided(partitions=1):
    return whole(partitions, shard_optimizer_state=True)


# Numbers of copies that a training begins with, its layout, and those that it changes to, after these batches.
WAYS = {
    "copies to partitions and back": (4, whole(), {2: whole(4), 8: whole()}),
    "partitions to copies": (1, whole(4), {1: whole(), EPOCH: whole(2)}),
    "shards to partitions and back": (4, sharded(4), {3: whole(4), 7: sharded(4)}),
    "divided states to copies": (4, divided(), {4: whole(), 5: divided(2)}),
    "copies to shards": (4, whole(), {1: sharded(2), 2: sharded(4), 11: whole()}),
    "partitions of shards": (2, sharded(2, 2), {EPOCH - 1: whole(), EPOCH + 1: sharded(2, 2)}),
    "each to each": (2, whole(2), {1: whole(4), 2: divided(2), 3: sharded(4), 4: sharded(2, 2), 9: whole(4)}),
}


def changing(way, event=Event.BATCH_END, **options):
    copies, keys, changes = WAYS[way]
    rows = {"rows": BATCH // copies} if options.pop("in_rows", False) else {}
    watches = Watches(changes, event)
    found = ended(*trainer_of(watches, copies, keys, **rows, **options), watches)
    assert not watches.changes and [number for number, *_ in watches.layouts] == list(changes)
    return found


def case_numbers_and_samples_are_those_of_one_process_whatever_the_layouts():
    expected = alone()
    for way in some(WAYS, 4, seed=3):
        require_as(expected, changing(way))


def case_layers_are_sliced_over_other_numbers_of_ranks():
    expected = alone()
    ways = (
        (4, {1: whole(tensor_parallel_degree=2), 4: whole(2, tensor_parallel_degree=2), 8: whole(2)}),
        (2, {2: whole(4), EPOCH: whole(tensor_parallel_degree=2), 9: whole(tensor_parallel_degree=1)}),
    )
    for copies, changes in ways:
        keys = {"prescaled_batch": True, "tensor_parallel_degree": 4 // copies}
        changes = {number: {"tensor_parallel_degree": 1} | keys for number, keys in changes.items()}
        watches = Watches(changes)
        found = ended(*trainer_of(watches, copies, keys), watches)
        assert not watches.changes
        require_as(expected, found)


def case_random_numbers_are_those_of_one_process():
    keys = {"dropout": 0.4, "device_train_microbatch_size": 2}
    expected = alone(rows=BATCH, **keys)
    for way in some(WAYS, 2, seed=5):
        require_as(expected, changing(way, in_rows=True, **keys))


def case_microbatches_are_shared_out():
    expected = alone(grad_accum=8, dropout=0.4, rows=BATCH)
    watches = Watches({2: whole(4), 3: whole(2), 9: whole()})
    made = trainer_of(watches, grad_accum=2, dropout=0.4, rows=BATCH // 4)
    found = ended(*made, watches)
    assert made[0].state.grad_accum == 2
    require_as(expected, found)


def evaluator():
    data = data_of(9, 2)
    return DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))


EVENTS = (
    Event.FIT_START,
    Event.EPOCH_START,
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.AFTER_TRAIN_BATCH,
    Event.EVAL_BATCH_END,
    Event.EVAL_END,
    Event.BATCH_CHECKPOINT,
    Event.EPOCH_END,
    Event.FIT_END,
)


def case_any_event_outside_of_a_step_asks_for_another_layout():
    expected = alone(eval_dataloader=evaluator(), eval_interval="3ba")
    for event in some(EVENTS, 4, seed=8):
        number = {Event.FIT_START: 0, Event.EPOCH_START: EPOCH, Event.FIT_END: 2 * EPOCH}.get(event, EPOCH)
        watches = Watches({number: divided(2)}, event)
        made = trainer_of(watches, eval_dataloader=evaluator(), eval_interval="3ba")
        found = ended(*made, watches)
        assert not watches.changes and watches.layouts[0][1] == 2
        require_as(expected, found)
        assert of_training(watches.events) == of_training(expected[0].events)
        assert made[0].state.eval_metric_values["loss"] == pytest.approx(evaluated(expected), rel=1e-6)


def of_training(events):
    """Lists what ranks hear alike: microbatches are those of a copy."""
    every = list(Event)
    others = [*every[every.index(Event.BEFORE_FORWARD) : every.index(Event.AFTER_BACKWARD) + 1], Event.LAYOUT_CHANGE]
    return [each for each in events if not each.is_eval and each not in others]


def evaluated(expected):
    model, batch = Net(), data_of(9, 2).tensors
    model.load_state_dict(expected[1])
    with torch.no_grad():
        return model.loss(model(batch), batch).mean().item()


def case_a_layout_changes_between_two_calls_of_fit():
    expected = alone()
    for changes in ({0: [whole(4)]}, {2: [sharded(4)], EPOCH: [whole(2)]}, {4: [whole(4), whole(), divided(2)]}):
        watches = Watches()
        made = trainer, *_ = trainer_of(watches)
        for number, layouts in changes.items():
            if ahead := number - int(trainer.state.timestamp.batch):
                trainer.fit(duration=f"{ahead}ba")
            for keys in layouts:
                lamina.change(**keys)
            torch.rand(number)  # a script's own numbers
        trainer.state.max_duration = "2ep"
        require_as(expected, ended(*made, watches))
        assert [number for number, *_ in watches.layouts] == [each for each in changes for _ in changes[each]]


class Stream(IterableDataset):
    """Reads of itself what its copy of the model is to have, once."""

    def __init__(self, copy, of):
        self.copy, self.of, self.begun = copy, of, 0

    def __iter__(self):
        self.begun += 1
        data = dataset(EPOCH * BATCH)
        return (data[number] for number in range(self.copy, len(data), self.of))


def case_ranks_that_read_for_the_same_copies_read_on():
    given = {"max_duration": "1ep", "schedulers": LinearScheduler(t_max="6ba")}
    expected = alone(loader=DataLoader(Stream(0, 1), BATCH), **given)
    stream = Stream(lamina.dist.get_global_rank(), 4)
    watches = Watches({1: divided(), 3: sharded(4), 4: whole()})
    made = trainer_of(watches, loader=DataLoader(stream, BATCH // 4), **given)
    require_as(expected, ended(*made, watches))
    assert stream.begun == 1 and len(watches.layouts) == 3


def case_workers_of_a_loader_end_with_the_layout():
    expected = alone()
    for way in some(WAYS, 1, seed=9):
        require_as(expected, changing(way, workers=1))


def of_torchdata(copies):
    data = dataset()
    sampler = lamina.dist.get_sampler(data, shuffle=True, seed=2)
    return StatefulDataLoader(data, BATCH // copies, sampler=sampler, drop_last=True)


def case_loaders_of_torchdata_and_microbatches_as_large_as_memory_allows_go_on():
    given = {"device_train_microbatch_size": "auto"}
    expected = alone(loader=of_torchdata(1), **given)
    watches = Watches({1: whole(4), 4: whole(2), EPOCH: whole()})
    require_as(expected, ended(*trainer_of(watches, loader=of_torchdata(4), **given), watches))
    assert len(watches.layouts) == 3


def case_checkpoints_are_saved_and_loaded_whatever_the_layouts():
    expected = alone()
    with folder() as path:
        watches = Watches({2: whole(4), 5: divided(2), 7: whole()})
        saves = {"save_folder": path, "save_interval": "1ba", "save_filename": "ba{batch}"}
        require_as(expected, ended(*trainer_of(watches, **saves), watches))
        for batch in some((3, 5, 6, 8), 2, seed=2):
            watches = Watches({batch + 1: whole(2), batch + 2: whole()})
            made = trainer_of(watches, load_path=path / f"ba{batch}")
            watches, state, states = ended(*made, watches)
            assert len(watches.layouts) == 2
            first = Watches()
            for name in ("losses", "rates", "read"):
                setattr(first, name, getattr(expected[0], name)[batch:])
            require_as((first, *expected[1:]), (watches, state, states))
        made = trainer_of(Watches(), load_path=path / "ba3")
        lamina.change(partitions=4)  # before a step has taken what is loaded
        require_same_state(expected, ended(*made, Watches()))


def require_same_state(expected, found):
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12)


class Changes(Algorithm):
    """Asks for random layouts, in which copies have the same microbatches where these matter, and counts them."""

    def __init__(self, case):
        self.draw, self.made = random.Random(case.number), 0
        size = case.microbatch.get("size", 1) if case.dropout else 1
        self.partitions = [each for each in (1, 2, 4) if case.batch % (4 // each * size) == 0]

    def match(self, event, state):
        return event in (Event.BATCH_END, Event.LAYOUT_CHANGE)

    def apply(self, event, state, logger):
        if event is Event.LAYOUT_CHANGE:
            self.made += 1
        elif self.draw.random() < 0.4:
            partitions = self.draw.choice(self.partitions)
            keys = self.draw.choice([whole, divided, functools.partial(sharded, max(2 // partitions, 1))])(partitions)
            lamina.change(**keys)


def case_random_trainings_have_the_numbers_of_one_process_in_random_layouts():
    made = 0
    for number in some(range(5000, 5040), 4, seed=6):
        case = TrainerCase(number, 4, ("copies", "sharded", "partitions"))
        changes = Changes(case)
        wrong = check(case, algorithms=[changes])
        assert not wrong, f"{case.name}: {wrong}"
        made += changes.made
    assert made > 1


class Halves(Algorithm):
    """Leaves half of the samples in each second batch, and hears of other layouts."""

    heard = 0

    def match(self, event, state):
        return event in (Event.AFTER_DATALOADER, Event.LAYOUT_CHANGE)

    def apply(self, event, state, logger):
        self.heard += event is Event.LAYOUT_CHANGE
        if event is Event.AFTER_DATALOADER and state.batch is not None and state.timestamp.batch.value % 2:
            state.batch = [part[: -(-len(part) // 2)] for part in state.batch]


def case_algorithms_go_on():
    kept, watches = Halves(), Watches({1: divided(), 3: sharded(4)})
    expected = ended(*trainer_of(first := Watches(), algorithms=Halves()), first)
    require_as(expected, ended(*trainer_of(watches, algorithms=kept), watches))
    assert kept.heard == 2


def refused(match, kind=UsageError, **keys):
    with pytest.raises(kind, match=match):
        lamina.change(**keys)


class Refused(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 2:
            refused("partitions", ConfigError, partitions=3)
            refused("microbatches: a Trainer's", partitions=2, microbatches=2)
            refused("fp16.*no key of a layout", fp16=True)
            refused("given different|different arguments", partitions=1 + lamina.rank() % 2)

    def before_forward(self, state, logger):
        if lamina.rank() == 0:
            refused("inside a step", partitions=2)

    def eval_batch_end(self, state, logger):
        if not state.timestamp.batch.value:
            refused(r"a callback of eval\(\) or predict\(\)", partitions=2)


def case_what_cannot_change_is_refused_at_once_and_the_training_goes_on():
    expected = alone()
    watches = Watches()
    made = trainer_of([watches, Refused()], eval_dataloader=evaluator())
    made[0].eval()
    require_as(expected, ended(*made, watches))
    made[0].close()
    watches = Watches()
    made = trainer_of(watches, 1, whole(4), loader=DataLoader(dataset(), BATCH), max_duration="1ep")
    refused("the loader 'train' says itself what each copy", partitions=1)
    made[0].close()
    data = dataset()
    loader = DataLoader(data, 6, sampler=lamina.dist.get_sampler(data))
    made = trainer_of(watches, 1, whole(4), loader=loader)
    refused("a batch of 6 samples does not divide among 4 copies", partitions=1)
    made[0].close()
    plain = DataLoader(data_of(9, 2), 2)
    made = trainer_of(watches, 1, whole(4), eval_dataloader=plain)
    refused("does not use DistributedSampler", (ConfigError, UsageError), partitions=1)  # the first rank's own error
    made[0].close()


def by_two_trainers(copies, changes):
    """Losses of a second Trainer with what a first one had, and all that it had."""
    given = {"schedulers": lambda state: 1.0, "max_duration": "1ep"}
    made = trainer, model, optimizer = trainer_of(Watches(changes), copies, rows=BATCH // copies, **given)
    kept, loader = list(map(id, model.parameters())), trainer.state.train_dataloader
    ended(*made, Watches())
    held = kept, [id(each) for group in optimizer.param_groups for each in group["params"]]
    watches, given = Watches(changes), given | {"seed": 7, "lamina_config": {"timeout_s": 60}}
    again = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, callbacks=watches, **given)
    return ended(again, model, optimizer, watches), held, loader


def case_everything_is_the_scripts_own_again_at_the_end():
    with world_of_one():
        expected, *_ = by_two_trainers(1, {})
    found, (parameters, held), loader = by_two_trainers(4, {1: whole(4), 3: sharded(2)})
    assert held == parameters and not lamina.is_initialized()
    assert (loader.batch_size, loader.batch_sampler.batch_size, loader.sampler.batch_size) == (2, 2, 2)
    require_as(expected, found)


def case_sigterm_is_heard_in_every_layout():
    with folder() as path:
        watches = Watches({1: whole(4)})
        made = trainer_of([watches, Ends()], save_folder=path)
        with pytest.raises(SystemExit) as end:
            made[0].fit()
        assert end.value.code == 143 and made[0].state.timestamp.batch.value in (3, 4)
        assert not lamina.is_initialized()


class Ends(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 3 and lamina.rank() == 1:
            signal.raise_signal(signal.SIGTERM)
