# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composer
import composer.core.time
import composer.models.tasks
import composer.trainer.trainer
import lamina.trainer
from lamina.trainer import Callback, ComposerClassifier, Engine, Event, State, Time, Trainer
from lamina.trainer.loggers import LoggerDestination


class Says(Callback):
    def __init__(self, said, name):
        self.said, self.name = said, name

    def run_event(self, event, state, logger):
        self.said.append((event.value, self.name))


class SaysAsLogger(Says, LoggerDestination):
    pass


def test_loggers_begin_first_and_hear_of_the_rest_last():
    said, state = [], State(None, "run", 0)
    state.callbacks = [SaysAsLogger(said, "logger"), Says(said, "callback")]
    engine = Engine(state, None)
    engine.run_event(Event.INIT)
    engine.run_event("BATCH_END")
    assert said == [("init", "logger"), ("init", "callback"), ("batch_end", "callback"), ("batch_end", "logger")]


class Fails(Callback):
    def batch_end(self, state, logger):
        raise ArithmeticError("in the training")

    def close(self, state, logger):
        raise OSError("in the end")


def test_an_error_of_the_training_is_not_lost_in_one_of_closing(capsys):
    x = torch.randn(9, 4)
    loader = DataLoader(TensorDataset(x, x.argmax(1)), 3)
    trainer = Trainer(model=ComposerClassifier(nn.Linear(4, 4)), max_duration=1, callbacks=Fails())
    with pytest.raises(ArithmeticError, match="in the training"):
        trainer.fit(train_dataloader=loader)
    assert "a callback could not be closed: OSError: in the end" in capsys.readouterr().err
    trainer.close()


class Counts(Callback):
    def __init__(self):
        self.seen = []

    def eval_batch_end(self, state, logger):
        self.seen.append((state.eval_timestamp.batch.value, state.eval_timestamp.sample.value))


def test_a_classifier_has_an_accuracy_and_an_evaluation_a_time():
    x = torch.randn(9, 4)
    loader, counts = DataLoader(TensorDataset(x, x.argmax(1)), 3), Counts()
    trainer = Trainer(model=ComposerClassifier(nn.Linear(4, 4)), eval_dataloader=loader, callbacks=counts)
    trainer.eval()
    right = (
        (trainer.state.model.module(next(iter(DataLoader(loader.dataset, 9)))).argmax(1) == x.argmax(1)).sum().item()
    )
    assert trainer.state.eval_metric_values == {"Accuracy": pytest.approx(right / 9)}
    assert counts.seen == [(1, 3), (2, 6), (3, 9)]
    assert trainer.state.eval_timestamp.sample == 9


def test_an_algorithm_reads_and_sets_a_part_of_the_batch():
    state = State(None, "run", 0)
    for batch, key in (((1, 2), 1), ((1, 2), -1), ([1, 2], 1), ({"x": 1, "y": 2}, "y")):
        state.batch = batch
        assert state.batch_get_item(key) == 2
        state.batch_set_item(key, 3)
        assert state.batch_get_item(key) == 3 and type(state.batch) is type(batch)
    pair = (lambda batch: batch["x"], lambda batch, value: {**batch, "x": value})
    assert state.batch_get_item(pair) == state.batch_get_item(pair[0]) == 1
    state.batch_set_item(pair, 5)
    assert state.batch == {"x": 5, "y": 3}


class OfItsOwn(ComposerClassifier):
    def __init__(self):
        self.num_classes = 7
        super().__init__(nn.Linear(4, 7))


def test_a_subclass_keeps_its_number_of_classes():
    assert OfItsOwn().num_classes == 7


def test_composers_modules_are_lamina_s():
    program = "import composer; composer.optim.StepScheduler, composer.utils.dist, composer.callbacks.LRMonitor"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert composer.trainer.trainer.Trainer is composer.Trainer is Trainer
    assert composer.core.time.Time[int].__origin__ is Time
    assert composer.models.tasks.ComposerClassifier is lamina.trainer.ComposerClassifier
    assert composer.__version__ == "0.12.1"
