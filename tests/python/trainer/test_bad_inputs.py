# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the Trainer, and of all that is made for it: each error names the argument and says what is
expected, before anything is started."""

import math
import os
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina.errors import ConfigError, UsageError
from lamina.trainer import (
    Callback,
    ComposerClassifier,
    DataSpec,
    Evaluator,
    HuggingFaceModel,
    Time,
    Timestamp,
    Trainer,
    ensure_time,
    get_precision_context,
    loggers,
    monitors,
)
from lamina.trainer import schedulers as schedules
from lamina.trainer.gradient_clipping import GradientClipping
from lamina.trainer.losses import parts_of
from lamina.trainer.reproducibility import seed_all

X = torch.randn(8, 4)


def loader():
    return DataLoader(TensorDataset(X, X[:, :2].argmax(1)), 2)


def trainer(**given):
    model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    defaults = {"model": model, "train_dataloader": loader(), "max_duration": 1, "optimizers": optimizer}
    return Trainer(**(defaults | given))


OTHER = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
COUNT = "a whole number, 1 or more, or -1 for all"
FLAG = "True or False"
TIME = "10ep"
# Wrong values of each argument, and what is expected instead.
ARGUMENTS = {
    "model": ([None, 3, nn.Linear(4, 2), ComposerClassifier], "forward(batch) and loss(outputs, batch)"),
    "train_dataloader": ([7, "text", DataLoader, {"dataloader": 3}, X, {1, 2}], "a DataLoader does, or any iterable"),
    "train_dataloader_label": ([3, None, ""], "a string"),
    "train_subset_num_batches": ([0, -2, 1.5, "3", None, True], COUNT),
    "max_duration": (["10", "10 eps", [1], True, ""], TIME),
    "optimizers": ([3, "sgd", torch.optim.SGD], "one optimizer of torch's or of lamina's"),
    "algorithms": ([3, [GradientClipping], monitors.LRMonitor()], "objects of Algorithm"),
    "callbacks": ([3, "x", [monitors.LRMonitor], GradientClipping("norm", 1.0)], "objects of Callback"),
    "loggers": ([3, "wandb", [loggers.InMemoryLogger]], "an object with log(step, values) and close()"),
    "schedulers": ([3, "cosine", schedules.LinearScheduler, [None]], "torch's are, those of lamina.trainer"),
    "step_schedulers_every_batch": ([3, "yes"], FLAG),
    "eval_dataloader": ([3, [3], "text"], "a DataLoader does, or any iterable"),
    "run_name": ([3, ["x"], [], X], "a string"),
    "load_path": (["nowhere"], "a checkpoint that a Trainer has saved"),
    "device": ([3, X], "'cpu', 'gpu' or a torch.device"),
    "precision": (["fp8", 3, ""], "one of fp32, amp_fp16, amp_bf16"),
    "grad_accum": ([0, -1, 1.5, "2", True, [2]], "a number, 1 or more"),
    "device_train_microbatch_size": ([0, -1, 1.5, "2", "many", True], "a number, 1 or more"),
    "seed": ([-1, 1.5, "7", 2**32, True], "a whole number, 0 to 2^32 - 1"),
    "dist_timeout": ([0, -1, "300", None, math.nan, math.inf], "a number"),
    "python_log_level": (["loud", 3, ""], "a level of Python's logging"),
    "lamina_config": ([3, []], "a dictionary"),
    "elastic_config": ([3, []], "a dictionary"),
    "save_interval": ([3.5, "1sp", X], "save_interval"),  # also where nothing is saved
    "save_filename": ([3, None, X], "a string"),
    "save_num_checkpoints_to_keep": (["3", -2, X], COUNT),
    "save_folder": (["a\0b"], "no zero bytes"),
    "console_log_interval": (["1sp", X], "console_log_interval"),
    "console_stream": (["nowhere", X], "'stdout' and 'stderr' are"),
    "fsdp_config": ([3, []], "a dictionary"),
    "deepspeed_config": ([3, "stage 2"], "a dictionary"),
    "max_durations": ([1], "no such argument; the nearest is max_duration"),
    "scale_schedule_ratio": ([2.0], "say the shorter max_duration"),
    "algorithm_passes": ([[print], X], "in the order of the list"),
    "load_object_store": ([3], "a folder that all ranks see"),
    "profiler": ([3], "lamina.timeline"),
    "spin_dataloaders": ([False], "with its next batch in any case"),
    "fsdp_auto_wrap": ([False], "what becomes a unit"),
    "compile_config": ([{}, {"mode": "default"}], "that torch.compile has wrapped"),
    "precision_config": ([{}], "fp8 is not there"),
    "save_metrics": ([True], "state_dict() is saved"),
    "save_ignore_keys": ([["x"]], "is not there yet"),
    "ddp_sync_strategy": (["forced_sync"], "averaged once for each batch"),
    **{name: (["yes", 3, None], FLAG) for name in ("progress_bar", "log_to_console", "deterministic_mode")},
    **{name: (["no"], FLAG) for name in ("load_weights_only", "autoresume", "accumulate_train_batch_on_tokens")},
}
# Calls, and the words of the error: a name and what is expected.
CALLS = [
    (lambda: trainer(max_duration=-1), "max_duration=-1", "above 0"),
    (lambda: trainer(max_duration="0ba"), "max_duration='0ba'", "above 0"),
    (lambda: trainer(max_duration="0.5dur"), "max_duration='0.5dur'", "some epochs, batches, samples"),
    (lambda: trainer(max_duration="1.5ep"), "max_duration", "a whole number of epochs"),
    (lambda: trainer(max_duration=math.nan), "max_duration", "it is a number"),
    (lambda: trainer(train_dataloader={}), "train_dataloader", "'dataloader'"),
    (lambda: trainer(train_dataloader={"dataloder": []}), "train_dataloader", "'dataloder'"),
    (lambda: trainer(optimizers=OTHER), "optimizers", "make it of model.parameters()"),
    (lambda: trainer(schedulers=torch.optim.lr_scheduler.StepLR(OTHER, 1)), "schedulers", "the Trainer's"),
    (lambda: trainer(schedulers=torch.optim.lr_scheduler.ReduceLROnPlateau(OTHER)), "schedulers", "takes a number"),
    (lambda: trainer(schedulers=lambda: 1.0), "schedulers", "a function of the State"),
    (lambda: trainer(grad_accum=10**20), "grad_accum=1", "2147483647 at most"),
    (
        lambda: trainer(schedulers=[schedules.LinearScheduler(), torch.optim.lr_scheduler.StepLR(OTHER, 1)]),
        "schedulers",
        "give one kind",
    ),
    (lambda: trainer(console_stream="stdin"), "stream", "'stdout' and 'stderr'"),
    (lambda: trainer(log_to_console=True, console_log_interval="1tok"), "console_log_interval", "epochs or batches"),
    (lambda: trainer(eval_dataloader=loader(), eval_interval="1tok"), "eval_interval", "some epochs, batches or parts"),
    (lambda: trainer(eval_dataloader=loader(), eval_interval="often"), "eval_interval", TIME),
    (lambda: trainer(eval_dataloader=loader(), eval_interval=True), "eval_interval", TIME),
    (lambda: trainer(eval_dataloader=loader(), eval_interval=-1), "eval_interval=-1", "0 or more"),
    (lambda: trainer(eval_dataloader=loader(), eval_subset_num_batches=0), "eval_subset_num_batches=0", COUNT),
    (lambda: trainer(eval_dataloader=[loader(), loader()]), "eval_dataloader", "Evaluator(label=...)"),
    (
        lambda: trainer(eval_dataloader=Evaluator(label="a", dataloader=loader(), metric_names=["f1"])),
        "no metric is named 'f1'",
        "there are CrossEntropy, MulticlassAccuracy",
    ),
    (lambda: trainer(device="tpu"), "device", "there are cpu"),
    (lambda: trainer(grad_accum=2, device_train_microbatch_size=2), "grad_accum", "give one of them"),
    (lambda: trainer(autoresume=True, save_folder="saved"), "autoresume", "run_name"),
    (lambda: trainer(load_path=3), "load_path", "a string"),
    (lambda: trainer(save_folder=3), "save_folder", "a string"),
    (lambda: trainer(save_folder=""), "save_folder", "a string, and not empty"),
    (lambda: trainer(save_folder="/proc/none"), "save_folder='/proc/none'", "No such file"),
    (lambda: trainer(save_folder="saved", save_filename="{epch}"), "save_filename", "{epoch}"),
    (lambda: trainer(save_folder="saved", save_filename="rank{rank}.pt"), "save_filename", "a name, from which"),
    (lambda: trainer(save_folder="saved", save_filename=3), "save_filename=3", "a string"),
    (lambda: trainer(save_folder="saved", save_interval="1tok"), "save_interval", "epochs or batches"),
    (lambda: trainer(save_folder="saved", save_interval=0), "save_interval=0", "above 0"),
    (lambda: trainer(save_folder="saved", save_num_checkpoints_to_keep=-2), "save_num_checkpoints_to_keep", COUNT),
    (lambda: trainer(save_folder="s3://bucket/{run_name}"), "save_folder='s3://bucket/{run_name}'", "all ranks see"),
    (lambda: trainer(save_folder=Path("s3://bucket/run")), "save_folder='s3:/bucket/run'", "fsspec.filesystem('s3')"),
    (lambda: trainer(save_folder="host:/runs"), "save_folder='host:/runs'", "host:/ begins the address"),
    (
        lambda: trainer(save_folder="saved", save_filename="s3://bucket/ep{epoch}.pt"),
        "save_filename",
        "save_folder says",
    ),
    (lambda: trainer(save_folder="saved", save_filename="../ep{epoch}.pt"), "save_filename", "save_folder says where"),
    (
        lambda: trainer(save_folder="saved", save_filename="{run_name}", run_name="a/b"),
        "save_filename",
        "a name without /",
    ),
    (lambda: trainer(save_folder="saved", save_interval=lambda: True), "save_interval", "called with state and event"),
    (lambda: trainer(eval_dataloader=loader(), eval_interval=lambda state: True), "eval_interval", "state and event"),
    (
        lambda: trainer(eval_dataloader={"a": loader(), "b": loader()}),
        "eval_dataloader",
        "not of a, b: several loaders",
    ),
    (lambda: trainer(load_path="gs://bucket/latest"), "load_path='gs://bucket/latest'", "fsspec.filesystem('gs')"),
    (lambda: trainer(load_path="https://host/latest.pt"), "load_path='https://host/latest.pt'", "https:// begins"),
    (lambda: loggers.FileLogger("oci://bucket/log.txt"), "FileLogger: filename='oci://bucket/log.txt'", "a path"),
    (
        lambda: HuggingFaceModel.hf_from_composer_checkpoint("hf://some/latest.pt"),
        "hf_from_composer_checkpoint: checkpoint_path='hf://some/latest.pt'",
        "a path",
    ),
    (
        lambda: HuggingFaceModel.hf_from_composer_checkpoint("nowhere/latest-rank0.pt"),
        "hf_from_composer_checkpoint: checkpoint_path='nowhere",
        "it is not there",
    ),
    (
        lambda: trainer(save_folder="saved", save_weights_only=True, run_name="a", autoresume=True),
        "save_weights_only: autoresume",
        "of a whole training",
    ),
    (lambda: trainer(save_folder="saved", save_num_checkpoints_to_keep="3"), "save_num_checkpoints_to_keep", COUNT),
    (lambda: trainer(save_folder="saved", lamina_config={"partition": 2}), "partition", "the nearest is partitions"),
    (lambda: trainer(save_folder="saved", lamina_config={"partitions": "two"}), "partitions", "an integer"),
    (lambda: trainer(lamina_config={"partitions": 0}), "partitions", "at least 1"),
    (lambda: trainer(lamina_config={"microbatches": 4}), "lamina_config", "say how many microbatches"),
    (lambda: trainer(elastic_config={"every": 4}), "elastic_config", "no every"),
    (lambda: trainer(elastic_config={"keep_every": 0}), "keep_every=0", '1 or more, or "auto"'),
    (lambda: trainer(elastic_config={"keep_every": True}), "keep_every=True", '1 or more, or "auto"'),
    (lambda: trainer(elastic_config={"layouts": {"partitions": 2}}), "layouts=", "a list of dictionaries"),
    (lambda: trainer(elastic_config={"layouts": [{"microbatches": 2}]}), "layouts", "say how many microbatches"),
    (lambda: trainer(elastic_config={"layouts": [{"partitions": set()}]}), "elastic_config", "JSON"),
    (lambda: trainer(fsdp_config={}, deepspeed_config={}), "deepspeed_config", "one of them"),
    (lambda: trainer(fsdp_config={"min_param": 1}), "min_param", "the nearest is min_params"),
    (lambda: trainer(fsdp_config={"sharding_strategy": "HALF"}), "sharding_strategy", "one of FULL_SHARD"),
    (lambda: trainer(deepspeed_config={"zero_optimization": {"stage": 4}}), "stage", "0 to 3"),
    (lambda: trainer(deepspeed_config={"train_batch_size": 3}), "train_batch_size", "1 x 2 samples"),
    (lambda: DataSpec(3), "dataloader=3", "a DataLoader does, or any iterable"),
    (lambda: DataSpec([], num_samples=-1), "num_samples=-1", "0 or more"),
    (lambda: DataSpec([], num_tokens=1.5), "num_tokens=1.5", "a whole number"),
    (lambda: DataSpec([], device_transforms=3), "device_transforms=3", "a function"),
    (lambda: DataSpec([], split_batch="x"), "split_batch='x'", "a function"),
    (lambda: DataSpec([], get_num_samples_in_batch=4), "get_num_samples_in_batch=4", "a function"),
    (lambda: DataSpec([], get_num_tokens_in_batch=4), "get_num_tokens_in_batch=4", "a function"),
    (lambda: DataSpec([], already_split="no"), "already_split='no'", FLAG),
    (lambda: DataSpec([], batches=3), "batches", "unexpected keyword"),
    (lambda: Evaluator(label=3, dataloader=[]), "label=3", "a string"),
    (lambda: Evaluator(dataloader=[]), "label", "missing"),
    (lambda: Evaluator(label="a", dataloader=3), "dataloader=3", "any iterable"),
    (lambda: Evaluator(label="a", dataloader=[], metric_names="acc"), "metric_names='acc'", "a list of strings"),
    (lambda: Evaluator(label="a", dataloader=[], metric_names=["("]), "metric_names=['(']", "regular expressions"),
    (lambda: Evaluator(label="a", dataloader=[], subset_num_batches=0), "subset_num_batches=0", COUNT),
    (lambda: Evaluator(label="a", dataloader=[], eval_interval=[3]), "eval_interval", TIME),
    (lambda: Time(1, "eps"), "'eps'", "ep, ba, sp, tok, sec, dur"),
    (lambda: Time("1", "ep"), "the number of epochs='1'", "a number"),
    (lambda: Time(math.inf, "ba"), "the number of batches=inf", "a number"),
    (lambda: Time.from_timestring("1x"), "'1x'", TIME),
    (lambda: Time.from_timestring(3), "timestring=3", "a string"),
    (lambda: Time(1, "ep") + "1ba", "1ep", "the same unit"),
    (lambda: Time(1, "ep") * Time(1, "ba"), "1ep times 1ba", "dur"),
    (lambda: ensure_time([1]), "[1]", TIME),
    (lambda: Timestamp(epoch="1ba"), "epoch='1ba'", "a number of epochs"),
    (lambda: Timestamp(batch=-1), "batch=-1", "0 or more"),
    (lambda: Timestamp(total_wct=3), "total_wct=3", "a datetime.timedelta"),
    (lambda: Timestamp() < 3, "3", "compared with a time"),
    (lambda: schedules.StepScheduler("x"), "step_size", TIME),
    (lambda: schedules.StepScheduler("1ep", gamma="x"), "gamma='x'", "a number"),
    (lambda: schedules.StepScheduler(0), "step_size=0", "above 0"),
    (lambda: schedules.MultiStepScheduler("1ep"), "milestones='1ep'", "a list of times"),
    (lambda: schedules.MultiStepScheduler(["x"]), "milestones", TIME),
    (lambda: schedules.ConstantScheduler("x"), "alpha='x'", "a number"),
    (lambda: schedules.ExponentialScheduler(0.5, 0), "decay_period=0", "above 0"),
    (lambda: schedules.LinearScheduler(alpha_f=None), "alpha_f=None", "a number"),
    (lambda: schedules.CosineAnnealingScheduler("x"), "t_max", TIME),
    (lambda: schedules.PolynomialScheduler("x"), "power='x'", "a number"),
    (lambda: schedules.CosineAnnealingWarmRestartsScheduler("1ep", t_mult=-1), "t_mult=-1", "0 or more"),
    (lambda: schedules.LinearWithWarmupScheduler("-1ba"), "t_warmup='-1ba'", "0 or more"),
    (lambda: schedules.PolynomialWithWarmupScheduler("1ba", scale_warmup="x"), "scale_warmup='x'", FLAG),
    (lambda: GradientClipping("nrm", 1.0), "clipping_type='nrm'", "'norm' or 'value'"),
    (lambda: GradientClipping("adaptive", 1.0), "clipping_type='adaptive'", "'norm' and 'value'"),
    (lambda: GradientClipping("norm", None), "clipping_threshold=None", "a number, 0 or more"),
    (lambda: monitors.SpeedMonitor(0), "window_size=0", "1 or more"),
    (lambda: monitors.OptimizerMonitor("x"), "log_optimizer_metrics='x'", FLAG),
    (lambda: monitors.EarlyStopper("a", "b", comp="x"), "comp='x'", "'greater' or 'gt'"),
    (lambda: monitors.EarlyStopper(3, "b"), "monitor=3", "a string"),
    (lambda: monitors.EarlyStopper("a", "b", patience="1sp"), "patience='1sp'", "epochs or batches"),
    (lambda: monitors.ThresholdStopper("a", "b", "x"), "threshold='x'", "a number"),
    (lambda: loggers.FileLogger("{x}"), "filename='{x}'", "run_name"),
    (lambda: loggers.FileLogger(3), "filename=3", "a string"),
    (lambda: loggers.FileLogger("a", flush_interval=0), "flush_interval=0", "1 or more"),
    (lambda: loggers.FileLogger("a", "remote"), "remote_file_name", "not uploaded"),
    (lambda: loggers.ConsoleLogger(0), "console_log_interval=0", "epochs or batches"),
    (lambda: loggers.ProgressBarLogger("x"), "stream", "'stdout' and 'stderr'"),
    (lambda: loggers.WandBLogger(log_artifacts=True), "log_artifacts", "not uploaded"),
    (lambda: ComposerClassifier(3), "module=3", "a module of torch's"),
    (lambda: ComposerClassifier(nn.Linear(2, 2), loss_fn=None), "loss_fn=None", "a function of outputs and targets"),
    (lambda: loggers.LoggerAdapter(lamina.JsonLines("s3://bucket/log.jsonl")), "path='s3://bucket", "s3:// begins"),
    (lambda: lamina.JsonLines("~/log.jsonl"), "path='~/log.jsonl'", "os.path.expanduser('~/log.jsonl')"),
    (lambda: ComposerClassifier(nn.Linear(2, 2), num_classes="x"), "num_classes='x'", "1 or more"),
    (lambda: ComposerClassifier(nn.Linear(2, 2), train_metrics=3), "train_metrics=3", "a metric of torchmetrics"),
    (lambda: HuggingFaceModel(nn.Linear(2, 2)), "model=Linear", "a model of transformers"),
    (lambda: get_precision_context("x"), "precision='x'", "one of fp32"),
    (lambda: seed_all(-1), "-1", "0 to 2^32 - 1"),
]
CALLS += [
    (lambda name=name, value=value: trainer(**{name: value}), name, expected)
    for name, (values, expected) in ARGUMENTS.items()
    for value in values
]
CALLS += [
    (lambda name=name: trainer(run_name=name), "run_name=", "a part of paths")
    for name in ("../x", "a/../../x", "..", "/tmp/x", "a\nb", "a\0b", "\x1b[31m")
]
assert len(CALLS) > 100


@pytest.mark.parametrize("call, name, expected", CALLS, ids=[f"{at} {each[1]}" for at, each in enumerate(CALLS)])
def test_a_wrong_argument_is_named_before_anything_is_started(call, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), pytest.raises((ConfigError, UsageError, TypeError)) as caught:
        warnings.simplefilter("error")
        call()
    assert name in str(caught.value) and expected in str(caught.value)
    assert not lamina.is_initialized() and not os.listdir(tmp_path)


# Arguments of fit and eval, of a Trainer that could train.
LATER = [
    ({"train_dataloader": 7}, "dataloader=7", "any iterable"),
    ({"train_dataloader_label": 3}, "train_dataloader_label=3", "a string"),
    ({"train_subset_num_batches": "x"}, "train_subset_num_batches='x'", COUNT),
    ({"duration": "x"}, "duration", TIME),
    ({"duration": 0}, "duration=0", "above 0"),
    ({"duration": "1dur"}, "duration='1dur'", "some epochs"),
    ({"reset_time": "x"}, "reset_time='x'", FLAG),
    ({"schedulers": "x"}, "schedulers", "functions"),
    ({"eval_dataloader": 3}, "dataloader=3", "any iterable"),
    ({"eval_interval": "1tok"}, "eval_interval='1tok'", "some epochs, batches or parts"),
    ({"eval_subset_num_batches": 0}, "eval_subset_num_batches=0", COUNT),
    ({"grad_accum": 0}, "grad_accum=0", "1 or more"),
    ({"precision": "amp_bf16"}, "precision='amp_bf16'", "the Trainer has fp32"),
    ({"precision": "fp8"}, "precision='fp8'", "one of fp32"),
    ({"scale_schedule_ratio": 0.5}, "scale_schedule_ratio=0.5", "the shorter max_duration"),
    ({"spin_dataloaders": False}, "spin_dataloaders=False", "in any case"),
    ({"grad_accum": 2**31}, "grad_accum=2147483648", "at most"),
    ({"device_train_microbatch_size": 1.5}, "device_train_microbatch_size=1.5", "1 or more"),
    ({"grad_accum": 2, "device_train_microbatch_size": 2}, "grad_accum", "give one of them"),
    ({"durations": 1}, "durations", "unexpected keyword"),
]


@pytest.mark.parametrize(
    "loss",
    [0.5, None, "x", {}, {"a": X.mean(), "b": 1.0}, (X.mean(), torch.tensor(3))],
    ids=lambda loss: type(loss).__name__,
)
def test_what_is_no_loss_is_named(loss):
    with pytest.raises(UsageError, match=r"the model's loss\(\) gave .* it gives a tensor of floating point numbers"):
        parts_of(loss)


def test_a_wrong_argument_of_fit_or_eval_is_named_before_a_batch_is_read():
    model = trainer()
    for given, name, expected in LATER:
        with pytest.raises((ConfigError, UsageError, TypeError)) as caught:
            model.fit(**given)
        assert name in str(caught.value) and expected in str(caught.value)
    for given, name, expected in [
        ({"eval_dataloader": 3}, "dataloader=3", "any iterable"),
        ({"eval_dataloader": loader(), "subset_num_batches": 0}, "subset_num_batches=0", COUNT),
        ({}, "eval_dataloader", "give it to the Trainer"),
    ]:
        with pytest.raises((ConfigError, UsageError)) as caught:
            model.eval(**given)
        assert name in str(caught.value) and expected in str(caught.value)
    assert not model.state.timestamp.batch.value
    model.fit()
    assert model.state.timestamp.batch == 4
    with pytest.raises(ConfigError, match="nothing counts has no end: DataSpec"):
        model.fit(duration="9tok")
    with pytest.raises(ConfigError, match="a schedule of 9tok stays where it begins"):
        model.fit(duration="1ba", schedulers=schedules.StepScheduler("9tok"))
    assert model.state.timestamp.batch == 4


def test_an_address_is_no_path_where_a_job_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = trainer()
    for what in (lamina.Metrics, lambda path: lamina.timeline(path).__enter__(), lambda path: lamina.save({}, path)):
        for path in ("s3://bucket/x", Path("gs://bucket/x"), "~/x"):
            with pytest.raises(UsageError, match=r"begins the address of a store|expanduser"):
                what(path)
    assert not os.listdir(tmp_path)
    model.close()


class Calls(Callback):
    """Calls a function once, at an event."""

    def __init__(self, event, function):
        setattr(self, event, lambda state, logger: self.done or self.done.append(function()))
        self.done = []


@pytest.mark.parametrize(
    "event, method, expected",
    [
        ("batch_end", "fit", "Trainer.fit: a callback of fit"),
        ("fit_end", "fit", "Trainer.fit: a callback of fit"),
        ("after_forward", "fit", "Trainer.fit was called inside a step"),
        ("after_forward", "eval", "Trainer.eval was called inside a step"),
        ("after_forward", "save_checkpoint", "Trainer.save_checkpoint was called inside a step"),
    ],
)
def test_what_a_callback_may_not_call_is_named(event, method, expected):
    model = trainer(eval_dataloader=loader(), callbacks=Calls(event, lambda: getattr(model, method)()))
    with pytest.raises(UsageError, match=expected):
        model.fit()
    model.close()


class Counts(Callback):
    def state_dict(self):
        return {"counted": 1}


def test_what_a_checkpoint_has_and_a_training_does_not_take_is_told(tmp_path, capfd):
    saved = str(tmp_path / "saved")
    given = {"save_folder": saved, "save_overwrite": True, "seed": 3, "progress_bar": False}
    for max_duration, options in (1, {"callbacks": Counts()}), (2, {"load_path": saved, "seed": 4}):
        model = trainer(max_duration=max_duration, **(given | options))
        model.fit()
        model.close()
    said = capfd.readouterr().err
    assert "seed=4: no effect, for the checkpoint goes on with 3" in said
    assert "it has states of callbacks that are not here now: Counts.0" in said


def test_a_model_of_transformers_names_what_a_batch_lacks():
    module = nn.Linear(4, 2)
    module.config = types.SimpleNamespace(architectures=["Linear"])
    model = HuggingFaceModel(module)
    with pytest.raises(UsageError, match="by the names of the model's inputs, not list: a collate_fn"):
        model([X, X])
    for outputs in ({"logits": X}, {"loss": None}, (X,)):
        with pytest.raises(UsageError, match=r"Linear gave no loss for a batch of input: .* has 'labels'"):
            model.loss(outputs, {"input": X})


def test_a_home_is_where_a_shell_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = trainer(save_folder="~/saved")
    model.fit()
    model.close()
    assert os.listdir(tmp_path / "saved")


def test_a_stopper_that_nothing_wakes_is_told(capfd):
    stoppers = [
        monitors.EarlyStopper("CrossEntropy", "test"),
        monitors.ThresholdStopper("loss/train/total", "train", 0.0),
    ]
    model = trainer(eval_dataloader=loader(), callbacks=stoppers, progress_bar=False)
    model.fit()
    model.close()
    said = [line for line in capfd.readouterr().err.splitlines() if "no effect" in line]
    assert len(said) == 1 and "EarlyStopper" in said[0] and "'test': there are 'train', 'eval'" in said[0]


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (lambda step: 0.5**step, "state.timestamp.batch.value"),
        (lambda state: None, "gave None, where a finite number"),
        (lambda state: math.nan, "gave nan, where a finite number"),
        (lambda state: torch.ones(2), "where a finite number"),
        (lambda state: "1", "gave '1', where a finite number"),
    ],
)
def test_a_schedule_that_gives_no_number_is_an_error_before_the_first_batch(schedule, expected):
    model = trainer(schedulers=schedule)
    with pytest.raises(ConfigError, match="schedulers: <function .*" + expected):
        model.fit()
    assert not model.state.timestamp.batch.value
    model.fit(schedulers=lambda state: torch.tensor(0.5), precision="fp32", scale_schedule_ratio=1.0)


def test_an_iterator_is_read_once():
    one = trainer(train_dataloader=iter([(X, X[:, :2].argmax(1))]), max_duration=2)
    with pytest.raises(UsageError, match="an iterator gives its batches once"):
        one.fit()
    assert one.state.timestamp.batch == 1


EVERY = Evaluator(label="a", dataloader=loader(), eval_interval=1)
# Arguments that have no effect beside the others, and what is said of them.
IDLE = [
    ({"save_interval": "1ba", "save_filename": "x"}, "save_filename and save_interval: no effect without save_folder"),
    ({"save_overwrite": True}, "save_overwrite: no effect without save_folder"),
    ({"save_num_checkpoints_to_keep": 2}, "save_num_checkpoints_to_keep: no effect without save_folder"),
    ({"save_latest_filename": "x", "save_folder": "saved"}, "save_latest_filename: no effect: load_path=save_folder"),
    ({"load_weights_only": True}, "load_weights_only: no effect without load_path"),
    ({"load_strict_model_weights": True}, "load_strict_model_weights: no effect without load_path"),
    ({"eval_interval": "2ba"}, "eval_interval: no effect without eval_dataloader"),
    ({"eval_interval": "2ba", "eval_dataloader": []}, "eval_interval: no effect without eval_dataloader"),
    ({"eval_subset_num_batches": 2}, "eval_subset_num_batches: no effect without eval_dataloader"),
    ({"eval_interval": "2ba", "eval_dataloader": EVERY}, "eval_interval: no effect, for each Evaluator has"),
    ({"step_schedulers_every_batch": True}, "step_schedulers_every_batch: no effect without schedulers"),
    ({"console_log_interval": "2ba"}, "console_log_interval: no effect without log_to_console"),
    ({"console_stream": "stdout", "progress_bar": False}, "console_stream: no effect without log_to_console"),
    ({"auto_log_hparams": True}, "auto_log_hparams: no effect without loggers"),
    (
        {"train_dataloader": None, "train_dataloader_label": "x"},
        "train_dataloader_label: no effect without train_dataloader",
    ),
    ({"seed": 3, "lamina_config": {"seed": 4}}, "seed=3: no effect, for lamina_config says seed: 4"),
    ({"dist_timeout": 30, "lamina_config": {"timeout_s": 40}}, "dist_timeout=30: no effect"),
]


@pytest.mark.parametrize("given, said", IDLE, ids=[" ".join(given) for given, _ in IDLE])
def test_an_argument_without_effect_is_told_in_a_line(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer(**given).close()
    assert f"lamina: Trainer: {said}" in capsys.readouterr().err


def test_what_has_an_effect_is_not_told(tmp_path, capsys):
    saves = {"save_folder": str(tmp_path), "save_interval": "1ba", "save_overwrite": True}
    evaluates = {"eval_dataloader": loader(), "eval_interval": "2ba", "eval_subset_num_batches": 1}
    follows = {"schedulers": schedules.LinearScheduler(), "step_schedulers_every_batch": True}
    logs = {"log_to_console": True, "console_log_interval": "2ba", "auto_log_hparams": True}
    trainer(seed=3, lamina_config={"seed": 3}, **saves, **evaluates, **follows, **logs).close()
    assert "no effect" not in capsys.readouterr().err


def test_an_argument_of_fit_without_effect_is_told_in_a_line(capsys):
    one = trainer()
    one.fit(eval_interval="2ba", step_schedulers_every_batch=True, train_dataloader_label="x", duration="1ba")
    said = capsys.readouterr().err
    for name, needed in (
        ("eval_interval", "eval_dataloader"),
        ("step_schedulers_every_batch", "schedulers"),
        ("train_dataloader_label", "train_dataloader"),
    ):
        assert f"lamina: fit: {name}: no effect without {needed}\n" in said
    one.close()


def test_an_evaluation_of_nothing_is_an_error_before_the_first_batch():
    few = DataLoader(TensorDataset(X[:3], X[:3, :2].argmax(1)), 8, drop_last=True)
    one = trainer(eval_dataloader=few)
    for call in one.fit, one.eval:
        with pytest.raises(
            (ConfigError, UsageError), match="the evaluation 'eval' has no value, for its loader gives no batch"
        ):
            call()
    assert not one.state.timestamp.batch.value and not one.state.eval_metric_values
    with pytest.raises(UsageError, match="an iterator gives its batches once"):
        one.eval(iter([]))
    one.close()


def test_what_counts_nothing_has_no_value():
    one = trainer()
    with pytest.raises(UsageError, match="has no value: none of its 0sp counts"):
        one.eval(DataSpec(loader(), get_num_samples_in_batch=lambda batch: 0))
    one.close()
