# SPDX-License-Identifier: Apache-2.0
import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composer
import composer.core.time
import composer.models.tasks
import composer.trainer.trainer
import composer.utils
import lamina.trainer
from lamina.errors import ConfigError
from lamina.trainer import Callback, ComposerClassifier, Engine, Event, State, Time, Trainer, states_of_ranks
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


def test_a_model_has_the_forward_again_that_it_was_given():
    x, model, calls = torch.randn(9, 4), ComposerClassifier(nn.Linear(4, 4)), []
    forward = model.forward
    model.forward = own = lambda batch: calls.append(len(batch[0])) or forward(batch)
    trainer = Trainer(model=model, max_duration=1, train_dataloader=DataLoader(TensorDataset(x, x.argmax(1)), 3))
    trainer.fit()
    trainer.close()
    assert calls[-3:] == [3, 3, 3] and vars(model)["forward"] is own


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
    scores = trainer.state.model.module(next(iter(DataLoader(loader.dataset, 9)))).detach()
    loss = nn.functional.cross_entropy(scores, x.argmax(1)).item()
    right = (scores.argmax(1) == x.argmax(1)).float().mean().item()
    assert trainer.state.eval_metric_values == {"Accuracy": pytest.approx(right), "CrossEntropy": pytest.approx(loss)}
    assert counts.seen == [(1, 3), (2, 6), (3, 9)]
    assert trainer.state.eval_timestamp.sample == 9 and trainer.state.eval_timestamp.total_wct.total_seconds() > 0


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


def test_modules_of_modules_are_there():
    from composer.algorithms.gradient_clipping.gradient_clipping import GradientClipping
    from composer.models.tasks.classification import ComposerClassifier as Classifier

    assert Classifier is ComposerClassifier and GradientClipping is composer.algorithms.GradientClipping
    assert "gradient_clipping" not in vars(lamina.trainer.gradient_clipping)


def test_what_is_not_there_of_composers_may_be_imported_and_says_so_when_it_is_used():
    import composer.functional
    from composer import algorithms
    from composer.algorithms.blurpool import BlurPool
    from composer.metrics.nlp import InContextLearningMetric
    from composer.utils.object_store import S3ObjectStore

    assert not isinstance(nn.Linear(1, 1), InContextLearningMetric)
    for name, use in {
        "composer.algorithms.blurpool.BlurPool": lambda: BlurPool(replace_convs=True),
        "composer.algorithms.SAM": lambda: algorithms.SAM(),
        "composer.functional.apply_blurpool": lambda: composer.functional.apply_blurpool(nn.Linear(1, 1)),
        "composer.datasets.mnist": lambda: composer.datasets.mnist.build(),
        "composer.utils.object_store.S3ObjectStore": lambda: type("Mine", (S3ObjectStore,), {})(),
    }.items():
        with pytest.raises(ConfigError, match=f"^{name} is not there: this `composer` is lamina's Trainer"):
            use()
    with pytest.raises(ImportError):
        from composer.algoritms import BlurPool


def test_what_is_not_there_of_composers_says_what_is_in_its_place():
    from composer.callbacks import CheckpointSaver
    from composer.checkpoint import load_checkpoint
    from composer.core.types import Metrics
    from composer.metrics import METRIC_DEFAULT_CTORS
    from composer.utils.dist import of_another_version
    from composer.utils.iter_helpers import ensure_tuple
    from composer.utils.reproducibility import seed_context

    assert ensure_tuple is composer.utils.ensure_tuple
    for use, place in (
        (lambda: CheckpointSaver("folder"), "save_folder, save_interval"),
        (lambda: type("Mine", (CheckpointSaver,), {})(), "save_folder, save_interval"),
        (lambda: load_checkpoint("a"), "load_path goes on"),
        (lambda: composer.utils.is_model_fsdp(1), "State has fsdp_enabled"),
        (lambda: seed_context(1), "load_rng_state"),
        (lambda: METRIC_DEFAULT_CTORS["x"], "bring it along"),
        (lambda: list(METRIC_DEFAULT_CTORS), "bring it along"),
        (lambda: of_another_version(), "bring it along"),
        (lambda: Metrics(), "bring it along"),
    ):
        with pytest.raises(ConfigError, match=f"is not there: this `composer` is lamina's Trainer.*{place}"):
            use()


def test_a_device_may_be_an_object():
    model, batch = ComposerClassifier(nn.Linear(4, 4)), {"x": [torch.zeros(2)], "id": "a"}
    state = Trainer(model=model, device=composer.devices.DeviceCPU()).state
    assert state.device.name == "cpu" and composer.utils.get_device(state.device) is state.device
    assert state.device.batch_to_device(batch)["x"][0].device.type == "cpu"
    assert Trainer(model=model).state.device.dist_backend == "gloo"


def test_one_and_several_become_a_tuple():
    for given, expected in ((None, ()), ("ab", ("ab",)), ([1, 2], (1, 2)), ({"a": 1}, (1,)), (3, (3,))):
        assert composer.utils.ensure_tuple(given) == expected


class OnMeta(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = (kind(4, device="meta") for kind in (square, square, nn.BatchNorm1d))
        self.a.weight.is_first, self.b.weight = True, self.a.weight

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def square(size, device):
    return nn.Linear(size, size, device=device)


class SaysItsValues(OnMeta):
    def param_init_fn(self, module):
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)


def test_a_model_on_the_meta_device_gets_the_values_that_it_says():
    x = torch.randn(8, 4)
    loader = DataLoader(TensorDataset(x, x.argmax(1)), 4)
    for kind in (SaysItsValues, OnMeta):
        model = ComposerClassifier(kind(), num_classes=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, max_duration="1ep")
        weight = model.module.a.weight
        assert weight is model.module.b.weight and weight.is_first and weight.any()
        assert kind is OnMeta or weight.equal(torch.eye(4))
        before = weight.detach().clone()
        trainer.fit()
        trainer.close()
        assert not weight.equal(before) and optimizer.param_groups[0]["params"][0] is weight


def test_a_module_on_the_meta_device_that_says_no_values_is_named():
    model = ComposerClassifier(nn.Sequential(nn.Linear(4, 4), nn.Module()), num_classes=4)
    model.module[1].scale = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(ConfigError, match=r"^module.1, a Module, is on the meta device.*reset_parameters"):
        Trainer(model=model)


class Begins(Callback):
    def init(self, state, logger):
        self.length, self.label, self.loader = state.dataloader_len, state.dataloader_label, state.train_dataloader


def test_a_callback_knows_the_loader_when_the_trainer_is_made():
    x, begins = torch.randn(9, 4), Begins()
    loader = DataLoader(TensorDataset(x, x.argmax(1)), 2)
    Trainer(model=ComposerClassifier(nn.Linear(4, 4)), train_dataloader=loader, callbacks=begins)
    assert (begins.length, begins.label, begins.loader) == (5, "train", loader)
    Trainer(
        model=ComposerClassifier(nn.Linear(4, 4)),
        train_dataloader=loader,
        train_subset_num_batches=3,
        train_dataloader_label="half",
        callbacks=begins,
    )
    assert (begins.length, begins.label) == (3, "half")


def test_states_are_alike_by_their_values_and_not_by_what_holds_them(monkeypatch):
    circle = []
    circle.append(circle)
    alike = {"tensor": torch.arange(3.0), "parameter": nn.Parameter(torch.ones(2)), "text": "ab", "numbers": np.ones(2)}
    other = copy.deepcopy(alike)
    gathered = {"A.0": [alike, other], "B.0": [{"x": torch.ones(2)}, {"x": torch.zeros(2)}], "C.0": [circle, circle]}
    of_each = [{name: each[rank] for name, each in gathered.items()} for rank in range(2)]
    digests = [{name: states_of_ranks._digest(each) for name, each in own.items()} for own in of_each]
    answers = iter([digests, of_each])
    monkeypatch.setattr(states_of_ranks, "allgather", lambda own, group: next(answers))
    assert states_of_ranks.differing(of_each[0]).keys() == {"B.0", "C.0"}
    assert states_of_ranks.are_alike([alike, other]) and not states_of_ranks.are_alike([alike, circle])


def test_on_another_number_of_ranks_states_are_rank_0s_and_a_line_says_so(monkeypatch, capsys):
    saved, of_ranks = {"A.0": "both", "B.0": "zero"}, {"B.0": ["zero", "one"]}
    for size, rank, own in ((2, 1, "one"), (2, 0, "zero"), (3, 2, "zero"), (1, 0, "zero")):
        monkeypatch.setattr(states_of_ranks, "size", lambda size=size: size)
        monkeypatch.setattr(states_of_ranks, "rank", lambda rank=rank: rank)
        assert states_of_ranks.own_of("saved", saved, of_ranks) == {"A.0": "both", "B.0": own}
    said = "lamina: saved: each of 2 ranks had a state of its own of B: on 1 ranks it is rank 0's\n"
    assert capsys.readouterr().err == said
