# SPDX-License-Identifier: Apache-2.0
"""The Trainer: what is asked of it, and the job that it begins."""

import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lamina.composer.arguments import Arguments, read_for_fit, require_alike, signature
from lamina.composer.composers_names import OF_TRAINER, Elsewhere
from lamina.composer.engine import Engine
from lamina.composer.evaluator import Evaluator, When, ensure_evaluators, ensure_when
from lamina.composer.gradient_clipping import GradientClipping
from lamina.composer.logger import Logger
from lamina.composer.loggers import ConsoleLogger, LoggerDestination, ProgressBarLogger
from lamina.composer.meta_values import give_values
from lamina.composer.metric_names import MetricsByName
from lamina.composer.precision import LossScaler, get_precision_context
from lamina.composer.reproducibility import configure_deterministic_mode, get_random_seed, seed_all
from lamina.composer.schedulers import Follower, bound_schedulers, require_schedulers, steps_every_batch
from lamina.composer.settings import Given, Settings, settings
from lamina.composer.state import State
from lamina.composer.wrap_policy import checkpoint_chosen, names_in, table, units
from lamina.dist.ranks import get_global_rank, get_world_size
from lamina.elastic import newcomers
from lamina.errors import ConfigError
from lamina.job import current
from lamina.job.lifetime import require_config
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, device
from lamina.job.seeds import set_rng_seed
from lamina.model.shards import holder
from lamina.trainer import checks, metrics
from lamina.trainer.checkpoints import Saver, load
from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.evaluation import Evaluation, require_batches
from lamina.trainer.events import Event
from lamina.trainer.job import TrainerJob
from lamina.trainer.layouts import Layouts
from lamina.trainer.loop import Loop
from lamina.trainer.prediction import Prediction
from lamina.trainer.ranks import copies
from lamina.trainer.shares import Ends, Shares
from lamina.trainer.survival import Survival
from lamina.trainer.time import Time, Timestamp, TimeUnit
from lamina.trainer.training_step import TrainingStep
from lamina.util.told import tell

_DIVIDE = ("partitions", "sharded_data_parallel_degree", "tensor_parallel_degree")
_TERMINATED = 128 + signal.SIGTERM


class Trainer(Elsewhere):
    """Trains a model, in any layout as one device would.

        trainer = Trainer(model=model, train_dataloader=loader, max_duration="2ep", optimizers=optimizer)
        trainer.fit()

    Every rank makes it, with its own loader. It begins a job of lamina's; the next Trainer, or `close`, ends that.

    Args:
        model: with its loss. All ranks build the same; values are those of world rank 0.
        max_duration: how far `fit` goes: "10ep", "500ba", "5e4sp", "1e9tok", "1h30m"; an int is epochs.

        Data of the training:
        train_dataloader: a loader, a DataSpec or a dictionary of its arguments. Over several ranks a DataLoader has a
            DistributedSampler (`lamina.dist.get_sampler`), which gets its place here.
        train_dataloader_label: its name.
        train_subset_num_batches: how many batches an epoch has at most; -1: all.
        grad_accum: in how many microbatches a batch of a rank is run; "auto": see the next one.
        device_train_microbatch_size: of how many samples its microbatches are; the last has fewer. "auto": as large as
            memory allows on every rank; they begin with the whole batch.
        spin_dataloaders: True; a training goes on with its next batch in any case.
        accumulate_train_batch_on_tokens: whether microbatches count by their tokens, and not by their samples.

        Updates:
        optimizers: one, over the model's parameters; without any SGD(lr=0.1).
        schedulers: one or several, which are multiplied: schedules of `lamina.trainer.schedulers`, or functions of a
            State; or one of torch's.
        step_schedulers_every_batch: whether torch's schedulers make a step after each batch; else after each epoch.
        scale_schedule_ratio: 1.0; say the shorter `max_duration`.

        Evaluations:
        eval_dataloader: what is evaluated in training: loaders, or Evaluators.
        eval_interval: how often: "1ep", "100ba", "0.1dur", or a function of State and event; an int is epochs.
        eval_subset_num_batches: how many batches are read for that; -1: all.

        What hears of the training:
        algorithms, callbacks: objects that hear of events.
        loggers: destinations of all metrics; a `lamina.Logger` is one, too.
        run_name: of this run, on all ranks; else one is made up.
        progress_bar: whether a bar shows how far the training is, on world rank 0.
        log_to_console: whether metrics are printed there.
        console_stream: where both go: "stdout", "stderr" or a file.
        console_log_interval: after how many epochs or batches metrics are printed.
        auto_log_hparams: whether loggers get these arguments as texts.
        python_log_level: of lamina's and Composer's names in Python's logging.
        log_traces, profiler: nothing; `lamina.timeline` shows what each rank does.
        algorithm_passes: nothing; algorithms hear of an event in the order of the list.

        Checkpoints that it goes on from:
        load_path: a checkpoint that a Trainer has saved, or the folder of several: then the newest one.
        load_weights_only: whether the model alone is loaded.
        load_strict_model_weights: whether names of weights have to be those of the model.
        autoresume: whether it goes on from the newest checkpoint of `save_folder`, where there is one.
        load_progress_bar: no effect.
        load_object_store: nothing; `load_path` is a folder that all ranks see.
        load_ignore_keys, load_exclude_algorithms: nothing yet.

        Checkpoints that it saves:
        save_folder: where they are, with {run_name} perhaps; all ranks see it.
        save_filename: their names, with {epoch}, {batch}, {sample}, {token} and {run_name}.
        save_latest_filename: no effect: `load_path=save_folder` goes on from the newest one.
        save_overwrite: whether the folder may have checkpoints, which those of the same name replace.
        save_interval: epochs or batches between them, and at the end; or a function of State and event.
        save_weights_only: whether the model alone is saved.
        save_num_checkpoints_to_keep: how many stay, the latest ones; -1: all; 0: none is saved.
        save_metrics: nothing; a Callback's `state_dict()` is saved.
        save_ignore_keys: nothing yet.

        Layout and numbers:
        fsdp_config, deepspeed_config: a layout in the words of one of them; `{}` has their defaults.
        fsdp_auto_wrap: True; `_fsdp_wrap`, `fsdp_wrap_fn` and fsdp_config's `min_params` say what becomes a unit.
        lamina_config: keys of `lamina.init`, which say any layout.
        elastic_config: under `lamina run --elastic`, how ranks with parts of the model go on without lost ones.
            "keep_every": so many batches lie between two versions that they keep, 1 or more, or "auto", as few as take
            2 % of the time. "layouts": in which they may go on, each as keys of `lamina.change`, the best first.
        device: "cpu", "gpu" for an accelerator of any type, or a torch.device; without any the accelerator, if there is
            one. The model, its optimizer's states and batches go there.
        precision: "fp32", "amp_fp16" or "amp_bf16", of forwards and losses.
        precision_config: nothing; fp8 is not there.
        compile_config: nothing; give a model that `torch.compile` has wrapped.
        seed: of all random numbers, from 0 to 2^32 - 1; else rank 0 draws one.
        deterministic_mode: whether torch takes algorithms alone that give the same bits again.
        dist_timeout: seconds after which a rank that does not answer is given up.
        ddp_sync_strategy: nothing; gradients are averaged once for each batch.

    What is nothing here is refused with what is there in its place.

    Errors:
        ConfigError: all that is wrong with the arguments, before anything is started.

    Attributes:
        state, logger, engine: what callbacks hear of.
        local_hparams: the arguments as texts, by name.
    """

    fsdp_enabled = property(lambda self: self.state.fsdp_enabled)
    deepspeed_enabled = property(lambda self: self.state.deepspeed_enabled)
    fsdp_config = property(lambda self: self.state.fsdp_config)
    deepspeed_config = property(lambda self: self.state.deepspeed_config)

    _elsewhere = OF_TRAINER

    def __init__(self, **arguments: Any):
        given = Arguments.of(arguments)
        self.auto_log_hparams, self.python_log_level = given.auto_log_hparams, given.python_log_level
        self.local_hparams = {name: repr(value) for name, value in arguments.items()}
        if given.python_log_level is not None:
            logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            for name in ("lamina", "composer"):
                logging.getLogger(name).setLevel(given.python_log_level.upper())
        if given.optimizers is None:
            warnings.warn("no optimizer was given: it is SGD(lr=0.1)", stacklevel=2)
            given.optimizers = torch.optim.SGD(given.model.parameters(), lr=0.1)
        self._spec, self._label = given.train_dataloader, given.train_dataloader_label
        self._most, self._by_tokens = given.train_subset_num_batches, given.accumulate_train_batch_on_tokens
        self._model = given.model
        self.state = State(given.model, given.run_name or "", given.seed)
        self.state.device, self.state.max_duration = given.device, given.max_duration
        self.state.fsdp_config, self.state.deepspeed_config = given.fsdp_config, given.deepspeed_config
        self._saved_by_hand: list[str] = []
        self._set_microbatches(given.device_train_microbatch_size, given.grad_accum)
        self.state.train_metrics = metrics.fresh(MetricsByName(given.model.get_metrics(is_train=True).items()))
        self._set_evaluators(given.eval_dataloader, given.eval_interval, given.eval_subset_num_batches)
        self.state.algorithms = given.algorithms
        self._schedulers = given.schedulers
        self._steps_every_batch = steps_every_batch(given.schedulers, given.step_schedulers_every_batch)
        destinations = _destinations(given)
        self.state.callbacks = [*destinations, *given.callbacks]
        self.logger = given.model.logger = Logger(self.state, destinations)
        self.engine = Engine(self.state, self.logger)
        self._shares: Shares | None = None
        self._saved: list[dict[str, Any]] | None = None  # what a checkpoint says of the loaders
        self._calls_before: int | None = None  # of fit, that had ended before the one which autoresume goes on with
        found = self._found = self._settings(given)
        if found.clipping_norm is not None:
            self.state.algorithms.append(GradientClipping("norm", found.clipping_norm))
        config = self._config(given, found)
        self._saver = self._saver_of(given)
        self.state.callbacks += [] if self._saver is None else [self._saver]
        if given.deterministic_mode:
            configure_deterministic_mode()
        self._begin(given, config, found)
        require_alike(arguments)
        if self._saver is not None:
            self._saver.name_folder(self.state.run_name)
            self._saver.take_folder(True)
        precision = functools.partial(get_precision_context, found.autocast, device().type)
        self._make_loop(precision, given)
        if self._spec is not None:
            self._read_on()
        self.engine.run_event(Event.INIT)
        if all(isinstance(each, torch.optim.lr_scheduler.LRScheduler) for each in self._schedulers):
            self._bind_schedulers()  # those have states
        self._load(given)
        self.engine.run_event(Event.AFTER_LOAD)
        if given.auto_log_hparams:
            self.logger.log_hyperparameters(self.local_hparams)

    __init__.__signature__ = signature()

    def fit(
        self,
        *,
        train_dataloader: Iterable | DataSpec | dict[str, Any] | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        duration: int | str | Time | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None,
        eval_subset_num_batches: int = -1,
        eval_interval: int | str | Time | When = 1,
        grad_accum: int | str | None = None,
        device_train_microbatch_size: int | str | None = None,
        precision: str | None = None,
        scale_schedule_ratio: float = 1.0,
        spin_dataloaders: bool = True,
    ) -> None:
        """Trains. What is given counts instead of what the Trainer was made with, which tells of each argument.

        Args:
            train_dataloader, train_dataloader_label, train_subset_num_batches: what is trained with.
            duration: how far to go from here on; else to `max_duration`.
            reset_time: whether the time begins anew.
            schedulers, step_schedulers_every_batch: of the learning rate.
            eval_dataloader, eval_subset_num_batches, eval_interval: what is evaluated, and when.
            grad_accum, device_train_microbatch_size: how a batch is cut, the one or the other.
            precision, scale_schedule_ratio, spin_dataloaders: as the Trainer has them.

        Errors:
            ConfigError: no loader, no duration, or one that has passed.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        self._job.require("Trainer.fit", amid_training=False)
        state, read = self.state, read_for_fit(given, _DEFAULTS_OF_FIT, self.state.precision)
        if train_subset_num_batches is not None:
            self._most = train_subset_num_batches
        if train_dataloader is not None:
            self._spec, self._label = read["train_dataloader"], train_dataloader_label
        if schedulers is not None:
            self._schedulers = require_schedulers(read["schedulers"], state.optimizers)
            self._steps_every_batch = steps_every_batch(self._schedulers, step_schedulers_every_batch)
        if eval_dataloader is not None:
            self._set_evaluators(read["eval_dataloader"], eval_interval, eval_subset_num_batches)
        if device_train_microbatch_size is not None or grad_accum is not None:
            self._set_microbatches(device_train_microbatch_size, grad_accum)
        self._set_time(read["duration"], reset_time)
        self._survival.call(self._take_work)
        self._bind_schedulers()
        if not state.timestamp.batch.value:
            self._tell_layout()
        survival = self._survival
        saves = self._saver is not None and self._saver.saves
        with survival.leaving_by_sigterm() if survival.may_leave else _asked_to_end(saves):
            try:
                with self._job.training():
                    self._loop.begin(self._steps_every_batch)
                    stops = survival.fit(
                        lambda: self._loop.fit(self._shares, self._most),
                        lambda: self._loop.go_on(self._shares, self._most),
                    )
            except BaseException:
                self._layouts.forget()
                self.engine.close()  # for loggers to write the traceback
                raise
            state.fits += not (stops or self._is_repeated)
            if stops:
                self._saver.save(state, asynchronous=False)
                self.close()
                sys.exit(_TERMINATED)

    def _make_loop(self, precision: Callable[[], contextlib.AbstractContextManager], given: Arguments) -> None:
        self._evaluation = Evaluation(self.state, self.engine, self.logger, precision, self._by_tokens)
        self._prediction = Prediction(self.state, self.engine, precision)
        self._layouts = Layouts(self._job, self.state, self.engine, lambda: self._shares, self._tell_layout)
        parts = self.logger, TrainingStep(self.state, self.engine, precision), self._evaluation.run
        self._loop = Loop(self.state, self.engine, *parts, self._layouts.change)
        self._survival = Survival(
            self._job, self.state, self.engine, self._loop, self._layouts, self._saver, *given.elastic_config
        )

    def _set_time(self, more: Time | None, reset_time: bool) -> None:
        """A call of `fit` begins: sets how far it goes, and the time anew where that is asked for. The call that a job
        has broken off, and a checkpoint goes on with, ends where it would have ended.

        Errors:
            ConfigError: it is not known which of a script's calls that is.
        """
        state, is_absolute = self.state, more is None and not reset_time
        self._is_resumed, before = self._calls_before is not None, self._calls_before
        if before and not is_absolute:
            raise ConfigError(
                f"fit(duration=...) and fit(reset_time=True) of a training that autoresume has go on from "
                f"{state.timestamp.batch}, after {before} other calls of fit: which call this one is, is not known. "
                "Say max_duration to the Trainer, and call fit() once; what is to happen between is a callback's"
            )
        self._is_repeated = bool(before) and state.max_duration is not None and state.is_done
        self._calls_before = before - 1 if self._is_repeated else None
        if self._is_repeated or (before == 0 and is_absolute):
            return
        if before == 0 and state.fit_began is not None:
            state.go_on_until(None if more is None else state.fit_began.get(more.unit) + more)
            if state.is_done and get_global_rank() == 0:
                tell(f"fit: nothing is left to be trained: in a job before, it ended at {state.timestamp.batch}")
            return
        if reset_time:
            state.timestamp = state.timestamp_before = Timestamp()
            state.unfinished = None
        if not is_absolute:  # however it was stopped before
            state.max_duration = state.max_duration if more is None else state.timestamp.get(more.unit) + more
        state.fit_began = state.timestamp

    def _take_work(self) -> None:
        """Reads the loader. Raises where there is nothing to be trained with, or no time."""
        state = self.state
        if self._spec is None or state.max_duration is None:
            missing = "train_dataloader" if self._spec is None else "max_duration"
            raise ConfigError(f"fit: there is no {missing}: give it to the Trainer, or to fit()")
        if state.max_duration.unit is TimeUnit.TOKEN and not self._spec.counts_tokens:
            raise ConfigError(
                f"fit: max_duration={state.max_duration} of a loader whose tokens nothing counts has no end: "
                "DataSpec(loader, get_num_tokens_in_batch=...) does"
            )
        if state.is_done and not self._is_resumed:
            why = f"max_duration={state.max_duration} has passed"
            if state.timestamp < state.max_duration:
                why = f"the training was stopped at {state.timestamp.batch}"
            raise ConfigError(f"fit: {why}: fit(duration=...) goes on for as long, fit(reset_time=True) begins anew")
        for evaluator in state.evaluators:
            require_batches(evaluator)
        self._read_on()

    def eval(
        self,
        eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None,
        subset_num_batches: int = -1,
    ) -> None:
        """Evaluates the model; the values are in `state.eval_metric_values`.

        Args:
            eval_dataloader: loaders or Evaluators; else those of the Trainer.
            subset_num_batches: how many batches are read, whatever the evaluators' own numbers are; -1: as they say.
        """
        self._job.require("Trainer.eval")
        if eval_dataloader is None and not self.state.evaluators:
            raise ConfigError("eval: there is no eval_dataloader: give it to the Trainer, or to eval()")
        most = checks.count_or_all("subset_num_batches", subset_num_batches)
        evaluators, measured = self.state.evaluators, self.state.eval_metrics
        if eval_dataloader is not None:
            self._set_evaluators(ensure_evaluators(eval_dataloader), 1, -1)
        try:
            with self._job.measuring():
                self._survival.call(functools.partial(self._evaluate_all, most))
        finally:
            self.state.evaluators, self.state.eval_metrics = evaluators, measured | self.state.eval_metrics

    def _evaluate_all(self, most: int) -> None:
        for evaluator in self.state.evaluators:
            self._evaluation.run(evaluator, most=evaluator.subset_num_batches if most == -1 else most)

    def predict(
        self,
        dataloader: Iterable | DataSpec | dict[str, Any],
        subset_num_batches: int = -1,
        *,
        return_outputs: bool = True,
    ) -> list[Any]:
        """The outputs of the model for each batch that this rank reads, on the host. Callbacks hear of events, and
        `state.outputs` are those of a batch.

        Args:
            dataloader: over several ranks with a DistributedSampler: no sample is repeated.
            subset_num_batches: how many batches are read at most; -1: all.
            return_outputs: with False the list is empty, for callbacks that keep outputs elsewhere.
        """
        self._job.require("Trainer.predict")
        spec = ensure_data_spec(dataloader)
        most = checks.count_or_all("predict: subset_num_batches", subset_num_batches)
        keeps = bool(checks.flag("predict: return_outputs", return_outputs))
        with self._job.measuring():
            return self._survival.call(lambda: self._prediction.run(spec, most, keeps))

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False) -> str:
        """Saves the training as it is now, as `load_path` takes it; every rank calls it, between steps.

        Args:
            name: its path, with {epoch}, {batch}, {sample}, {token} and {run_name} in the last part.
            weights_only: whether the model alone is saved.

        Returns:
            The path of the checkpoint.
        """
        self._job.require("Trainer.save_checkpoint")
        folder, own = os.path.split(checks.path("save_checkpoint: name", name))
        checks.flag("save_checkpoint: weights_only", weights_only)
        saver = Saver(folder or ".", own, Time(1, TimeUnit.EPOCH), weights_only, -1, lambda: self._shares)
        saver.name_folder(self.state.run_name)
        saver.take_folder(True)
        self._survival.call(lambda: saver.save(self.state, asynchronous=False))
        self._saved_by_hand.append(saver.places[0])
        return saver.places[0]

    def save_checkpoint_to_save_folder(self) -> None:
        """Saves the training as it is now among those of `save_folder`; every rank calls it, between steps."""
        self._job.require("Trainer.save_checkpoint_to_save_folder")
        if self._saver is None:
            raise ConfigError(
                "save_checkpoint_to_save_folder: there is no save_folder: save_checkpoint(name) needs none"
            )
        saver = self._saver
        self._survival.call(lambda: saver.save(self.state, asynchronous=False))

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of all checkpoints that were saved, those that newer ones have replaced included."""
        return [*(self._saver.places if self._saver is not None else ()), *self._saved_by_hand]

    def close(self) -> None:
        """Ends the job; every rank calls it. The model and its optimizer are plain ones again, whole on every rank."""
        self.engine.close()
        self._job.end()

    def _read_on(self) -> None:
        """The loader is read, amid an epoch from where the last fit() ended."""
        before, state = self._shares, self.state
        if before is None or before.is_read or before.spec is not self._spec:
            self._shares = Shares(self._spec, self._by_tokens)
        is_new = before is not None and before is not self._shares
        is_amid = self._saved is None and is_new and bool(state.timestamp.batch_in_epoch.value)
        if is_amid and before.spec.dataloader is self._spec.dataloader:
            self._saved = [before.state_dict()]
        if self._saved is not None:
            time = state.timestamp
            self._shares.go_on(self._saved, time.batch_in_epoch.value, time.sample_in_epoch.value)
            state.go_on_amid_epoch(self._shares.is_dealt_anew)
            self._saved = None
        state.train_dataloader, state.counts_tokens = self._spec.dataloader, self._spec.counts_tokens
        state.set_dataloader(self._spec, self._label, self._shares.batches(self._most))

    def _set_microbatches(self, size: int | str | None, count: int | str | None) -> None:
        state = self.state
        state.auto_microbatching = "auto" in (size, count)
        state.device_train_microbatch_size = None if state.auto_microbatching else size
        state.grad_accum = None if size is not None or state.auto_microbatching else count or 1

    def _tell_layout(self) -> None:
        """Says once, on world rank 0, how the training is spread."""
        if get_global_rank() != 0 or newcomers.is_one():
            return
        state, of, own = self.state, copies(), self._spec.batch_size
        if state.auto_microbatching:
            cut = "microbatches as large as memory allows"
        elif state.device_train_microbatch_size:
            cut = f"microbatches of {state.device_train_microbatch_size}"
        else:
            cut = f"{state.grad_accum} microbatch{'es' if state.grad_accum > 1 else ''}"
        batch = "batches of any size" if own is None else f"batch {own * of} = {of} x {own}"
        ranks = get_world_size()
        config = current.session().config
        held = all(getattr(config, key, value) == value for key, value in self._found.keys.items())
        layout = f"{self._found.layout + ': ' if held and self._found.layout else ''}{self._division()}"
        where = f"{ranks} rank{'s' if ranks > 1 else ''} on {device().type}"
        tell(f"{where}, {state.precision.value}, {batch} in {cut}, {layout}")

    def _division(self) -> str:
        """How many parameters the model has, and how they are divided."""
        whole = f"{_count(self._parameters)} parameters"
        degrees = {name: getattr(current.session().config, name) for name in _DIVIDE}  # those of the environment, too
        parts = {name: degree for name, degree in degrees.items() if degree != 1}
        if parts.keys() == {"sharded_data_parallel_degree"}:
            return f"{_count(sum(holder(each).numel() for each in self.state.model.parameters()))} of {whole} each"
        named = ", ".join(f"{name} {degree}" for name, degree in parts.items())
        return f"{whole} in parts ({named})" if parts else whole

    def _bind_schedulers(self) -> None:
        if self._schedulers:
            self.state.schedulers, self._schedulers = bound_schedulers(self._schedulers, self.state), []
        for scheduler in self.state.schedulers:
            if isinstance(scheduler, Follower):
                scheduler.set_rates()

    def _saver_of(self, given: Arguments) -> Saver | None:
        if given.save_folder is None:
            return None
        options = given.save_interval, given.save_weights_only, given.save_num_checkpoints_to_keep
        saver = Saver(given.save_folder, given.save_filename, *options, lambda: self._shares)
        if not saver.saves and get_global_rank() == 0:
            tell("save_num_checkpoints_to_keep=0: no checkpoint stays, so none is saved")
        if given.run_name or "{run_name}" not in saver.folder:
            saver.name_folder(given.run_name or "")
            goes_on = given.save_overwrite or given.autoresume or given.load_path is not None
            saver.take_folder(goes_on or not saver.saves or newcomers.is_one())
        return saver

    def _load(self, given: Arguments) -> None:
        """Goes on from the checkpoint that is asked for, if any."""
        weights_only, strict = given.load_weights_only, given.load_strict_model_weights
        if given.autoresume:
            self._saved = load(self._saver.folder, self.state, False, True, missing_ok=True)
            self._calls_before = None if self._saved is None else self.state.fits
            if self._saved is not None and given.load_path is not None and get_global_rank() == 0:
                tell("Trainer: load_path: no effect, for autoresume goes on from save_folder")
        if given.load_path is not None and self._saved is None:
            self._saved = load(given.load_path, self.state, weights_only, strict)
            self.state.fits = 0
        if self._saved is not None and given.seed not in (None, self.state.seed) and get_global_rank() == 0:
            tell(f"Trainer: seed={given.seed}: no effect, for the checkpoint goes on with {self.state.seed}")
        self._job.has_loaded = self._saved is not None or given.load_path is not None

    def _microbatches(self) -> int:
        """How many microbatches a full batch of a copy has."""
        size = self.state.device_train_microbatch_size
        if size is None:
            return self.state.grad_accum or 1
        batch = self._spec and self._spec.batch_size
        return 1 if batch is None else -(-batch // size)

    def _set_evaluators(self, evaluators: list[Evaluator], interval: Any, most: int) -> None:
        found = self._model.get_metrics(is_train=False) if evaluators else {}
        self.state.eval_metrics = {each.label: MetricsByName(each.metrics_of(found)) for each in evaluators}
        self.state.evaluators = [evaluator.settled(ensure_when(interval), most) for evaluator in evaluators]

    def _settings(self, given: Arguments) -> Settings:
        """The settings that the configurations stand for. The modules that they choose are checkpointed."""
        size = given.device_train_microbatch_size
        facts = Given(
            ranks=get_world_size(),
            device_type=given.device.there.type,
            batch_size=given.train_dataloader and given.train_dataloader.batch_size,
            device_train_microbatch_size="auto" if self.state.auto_microbatching else size,
            grad_accum=self.state.grad_accum,
        )
        found = settings(given.fsdp_config, given.deepspeed_config, given.precision, given.lamina_config, facts)
        chosen = checkpoint_chosen(given.model) if found.activation_checkpointing else []
        if found.min_params is not None:
            every = units(given.model, found.min_params)
            degree = found.keys.get("sharded_data_parallel_degree", 1)
            if degree > 1:
                found.keys.setdefault("sdp_units", [unit.name for unit in every if unit.rule != "whole"])
                persistent = [name for unit in every if unit.rule == "whole" for name in unit.parameters]
                persistent += names_in(given.model, found.ignored)
                found.keys.setdefault("sdp_persistent_parameters", persistent)
            if found.verbose and get_global_rank() == 0:
                print(table(every, chosen, degree))
        if found.unheeded and get_global_rank() == 0:
            tell(f"no effect, for they change no result: {', '.join(found.unheeded)}")
        self.state.precision = found.precision
        self._parameters = sum(parameter.numel() for parameter in given.model.parameters())
        return found

    def _config(self, given: Arguments, found: Settings) -> dict[str, Any]:
        """The configuration of the job."""
        config = {"ddp": True, "timeout_s": given.dist_timeout, "microbatches": self._microbatches()}
        config |= {"sdp_gradient_clipping": None} | found.keys  # else shards clip to 1
        config["device"] = given.device.key
        require_config(config)
        return config

    def _begin(self, given: Arguments, config: dict[str, Any], found: Settings) -> None:
        """Begins the job, and has all ranks agree on seed and name."""
        state = self.state
        give_values(given.model)
        ends = self.engine.close, functools.partial(setattr, state, "model", given.model)
        given.device.optimizer_to_device(given.optimizers)
        self._job = TrainerJob(config, given.model, given.optimizers, found.optimizer_arguments, *ends)
        self.state.scaler = LossScaler(enabled=found.grad_scaler)
        state.model, state.optimizers = self._job.model, [self._job.optimizer]
        metrics.put_on_device(state.train_metrics)
        drawn = get_random_seed()
        asked, name = config.get("seed", given.seed), f"{int(time.time())}-{drawn % 10**6:06}"
        seed = drawn if asked is None else asked
        state.seed, state.run_name = allgather((seed, state.run_name or name), WORLD)[0]
        seed_all(state.seed)
        set_rng_seed(state.seed)


_DEFAULTS_OF_FIT = {
    name: each.default for name, each in inspect.signature(Trainer.fit).parameters.items() if name != "self"
}


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.3g} M" if parameters >= 1e5 else f"{parameters:,}"


def _destinations(given: Arguments) -> list[LoggerDestination]:
    """The loggers that are asked for, one way or the other."""
    found = list(given.loggers)
    if given.progress_bar and not any(isinstance(each, ProgressBarLogger) for each in found):
        found.append(ProgressBarLogger(given.console_stream))
    if given.log_to_console and not any(isinstance(each, ConsoleLogger) for each in found):
        found.append(ConsoleLogger(given.console_log_interval, given.console_stream))
    return found


@contextlib.contextmanager
def _asked_to_end(saves: bool) -> Iterator[None]:
    """Inside, SIGTERM has the training end with its batch, where it can be saved; after that it counts."""
    if not saves or threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = current.job().own(Ends)
    ends.by_sigterm, ends.is_asked = True, False

    def ask(*_: Any) -> None:
        ends.is_asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ends.by_sigterm = False
    if ends.is_asked:
        signal.raise_signal(signal.SIGTERM)
