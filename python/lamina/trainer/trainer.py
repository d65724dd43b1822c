# SPDX-License-Identifier: Apache-2.0
"""The Trainer: what is asked of it, and the job that it begins."""

import random
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lamina.errors import ConfigError, UsageError
from lamina.job import current
from lamina.job.lifetime import init, shutdown
from lamina.job.messages import allgather, barrier
from lamina.job.ranks import WORLD
from lamina.optim.optimizer import DistributedOptimizer
from lamina.pipeline.distributed_model import DistributedModel
from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.evaluator import Evaluator, When, ensure_evaluators, ensure_when
from lamina.trainer.events import Algorithm, Callback, Engine, Event
from lamina.trainer.logger import Logger
from lamina.trainer.loop import Loop
from lamina.trainer.model import ComposerModel, require_model
from lamina.trainer.state import State
from lamina.trainer.time import Time, Timestamp, ensure_time


class Trainer:
    """Trains a model, in any layout as one device would.

        trainer = Trainer(model=model, train_dataloader=loader, max_duration="2ep", optimizers=optimizer)
        trainer.fit()

    Every rank makes it, with its own loader. It begins a job of lamina's; the next Trainer, or `close`, ends that.

    Args:
        model: with its loss. All ranks build the same; values are those of world rank 0.
        train_dataloader: a loader, a DataSpec or a dictionary of its arguments. Over several ranks a DataLoader has a
            DistributedSampler (`lamina.dist.get_sampler`), which gets its place here.
        train_dataloader_label: its name.
        train_subset_num_batches: how many batches an epoch has at most; -1: all.
        max_duration: how far `fit` goes: "10ep", "500ba", "5e4sp", "1e9tok", "1h30m"; an int is epochs.
        algorithms, callbacks: what hears of events.
        optimizers: one, over the model's parameters; without any SGD(lr=0.1).
        eval_dataloader: what is evaluated in training: loaders, or Evaluators.
        eval_interval: how often; an int is epochs.
        eval_subset_num_batches: how many batches are read for that; -1: all.
        loggers: get all metrics.
        run_name: of this run, on all ranks; else one is made up.
        grad_accum: in how many microbatches a batch of a rank is run.
        device_train_microbatch_size: of how many samples its microbatches are; the last has fewer.
        seed: of all random numbers; else rank 0 draws one.
        dist_timeout: seconds after which a rank that does not answer is given up.
        lamina_config: keys of `lamina.init`.

    Errors:
        ConfigError: what is wrong with the arguments, before anything is started.
    """

    def __init__(
        self,
        *,
        model: ComposerModel,
        train_dataloader: Iterable | DataSpec | dict[str, Any] | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        max_duration: int | str | Time | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        optimizers: torch.optim.Optimizer | None = None,
        eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None,
        eval_interval: int | str | Time | When = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: Any = None,
        run_name: str | None = None,
        grad_accum: int | None = 1,
        device_train_microbatch_size: int | None = None,
        seed: int | None = None,
        dist_timeout: float = 1800.0,
        lamina_config: Mapping[str, Any] | None = None,
    ):
        self._spec = None if train_dataloader is None else ensure_data_spec(train_dataloader)
        self._label, self._most = train_dataloader_label, train_subset_num_batches
        optimizer = _optimizer(require_model(model), optimizers)
        evaluators = ensure_evaluators(eval_dataloader)
        self.state = State(model, run_name or "", _checked_seed(seed))
        self.state.max_duration = max_duration
        self._set_microbatches(device_train_microbatch_size, grad_accum)
        self._set_evaluators(evaluators, eval_interval, eval_subset_num_batches)
        self.state.algorithms = _listed(algorithms)
        self.state.callbacks = [*_listed(loggers), *_listed(callbacks)]
        self.logger = model.logger = Logger(_listed(loggers))
        self.engine = Engine(self.state, self.logger)
        self._begin(model, optimizer, dict(lamina_config or {}), dist_timeout)
        self._loop = Loop(self.state, self.engine, self.logger)
        self.engine.run_event(Event.INIT)

    def fit(
        self,
        *,
        train_dataloader: Iterable | DataSpec | dict[str, Any] | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        duration: int | str | Time | None = None,
        reset_time: bool = False,
        eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None,
        eval_subset_num_batches: int = -1,
        eval_interval: int | str | Time | When = 1,
        grad_accum: int | None = None,
        device_train_microbatch_size: int | None = None,
    ) -> None:
        """Trains. What is given counts instead of what the Trainer was made with.

        Args:
            duration: how far to go from here on; else to `max_duration`.
            reset_time: whether the time begins anew.

        Errors:
            ConfigError: no loader, no duration, or one that has passed.
        """
        self._require_job("fit")
        state = self.state
        if train_dataloader is not None:
            self._spec, self._label = ensure_data_spec(train_dataloader), train_dataloader_label
        if train_subset_num_batches is not None:
            self._most = train_subset_num_batches
        if eval_dataloader is not None:
            self._set_evaluators(ensure_evaluators(eval_dataloader), eval_interval, eval_subset_num_batches)
        if device_train_microbatch_size is not None or grad_accum is not None:
            self._set_microbatches(device_train_microbatch_size, 1 if grad_accum is None else grad_accum)
        if reset_time:
            state.timestamp = state.timestamp_before = Timestamp()
        if duration is not None:
            more = ensure_time(duration)
            state.max_duration = state.timestamp.get(more.unit) + more
        if self._spec is None or state.max_duration is None:
            missing = "train_dataloader" if self._spec is None else "max_duration"
            raise ConfigError(f"fit: there is no {missing}: give it to the Trainer, or to fit()")
        if state.timestamp >= state.max_duration:
            raise ConfigError(
                f"fit: max_duration={state.max_duration} has passed: fit(duration=...) goes on for as long, "
                "fit(reset_time=True) begins anew"
            )
        self._loop.fit(self._spec, self._label, self._most)

    def eval(
        self,
        eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None,
        subset_num_batches: int = -1,
    ) -> None:
        """Evaluates the model; the values are in `state.eval_metric_values`.

        Args:
            eval_dataloader: loaders or Evaluators; else those of the Trainer.
            subset_num_batches: how many batches are read of those without a number of their own; -1: all.
        """
        self._require_job("eval")
        if eval_dataloader is None and not self.state.evaluators:
            raise ConfigError("eval: there is no eval_dataloader: give it to the Trainer, or to eval()")
        kept = self.state.evaluators
        if eval_dataloader is not None:
            self._set_evaluators(ensure_evaluators(eval_dataloader), 1, subset_num_batches)
        for evaluator in self.state.evaluators:
            self._loop.evaluate(evaluator)
        self.state.evaluators = kept or self.state.evaluators

    def close(self) -> None:
        """Ends the job; every rank calls it. The model is a plain one again."""
        if current.is_initialized() and current.job().model is self.state.model:
            self.engine.close()
            barrier()
            shutdown()

    def _set_microbatches(self, size: int | None, pieces: int | None) -> None:
        if size is not None and pieces not in (None, 1):
            raise ConfigError("grad_accum and device_train_microbatch_size say the same: give one of them")
        for name, value in (("device_train_microbatch_size", size), ("grad_accum", pieces)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r}: it is a number, 1 or more")
        self.state.device_train_microbatch_size = size
        self.state.grad_accum = None if size is not None else pieces or 1

    def _set_evaluators(self, evaluators: list[Evaluator], interval: Any, most: int) -> None:
        module = self.state.model.module if isinstance(self.state.model, DistributedModel) else self.state.model
        metrics = module.get_metrics(is_train=False) if evaluators else {}
        if not evaluators and (interval != 1 or most != -1):
            raise ConfigError("eval_interval and eval_subset_num_batches say nothing without an eval_dataloader")
        self.state.eval_metrics = {evaluator.label: evaluator.metrics_of(metrics) for evaluator in evaluators}
        for evaluator in evaluators:
            if evaluator.eval_interval is None:
                evaluator.eval_interval = ensure_when(interval)
            if evaluator.subset_num_batches is None:
                evaluator.subset_num_batches = most
        self.state.evaluators = evaluators

    def _begin(
        self, model: ComposerModel, optimizer: torch.optim.Optimizer, config: dict[str, Any], timeout_s: float
    ) -> None:
        """Begins the job, spreads the model over it, and has all ranks agree on seed and name."""
        shutdown()  # of the Trainer before
        config = {"ddp": True, "timeout_s": timeout_s} | config
        if self.state.seed is not None:
            config.setdefault("seed", self.state.seed)
        if config.get("microbatches", 1) != 1:
            raise ConfigError("lamina_config: grad_accum and device_train_microbatch_size say how many microbatches")
        init(config)
        self.state.model = DistributedModel(model, average_grads_across_microbatches=False)
        self.state.optimizers = [DistributedOptimizer(optimizer)]
        own = self.state.seed, self.state.run_name
        drawn = (
            random.SystemRandom().randrange(2**31),
            f"{int(time.time())}-{random.SystemRandom().randrange(10**6):06}",
        )
        found = [other if given in (None, "") else given for given, other in zip(own, drawn, strict=True)]
        self.state.seed, self.state.run_name = allgather(found, WORLD)[0]
        self.state.rank_zero_seed = self.state.seed
        torch.manual_seed(self.state.seed)

    def _require_job(self, what: str) -> None:
        if not current.is_initialized() or current.job().model is not self.state.model:
            raise UsageError(f"Trainer.{what}: this Trainer was closed, or another one was made after it")


def _optimizer(model: ComposerModel, given: Any) -> torch.optim.Optimizer:
    """The one optimizer, which is over parameters of the model."""
    several = _listed(given)
    if not several:
        warnings.warn("no optimizer was given: it is SGD(lr=0.1)", stacklevel=3)
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if len(several) > 1 or not isinstance(several[0], torch.optim.Optimizer):
        kinds = ", ".join(type(each).__name__ for each in several)
        raise ConfigError(f"optimizers: one optimizer of torch's or of lamina's, not {kinds}")
    own = set(map(id, model.parameters()))
    if any(id(parameter) not in own for group in several[0].param_groups for parameter in group["params"]):
        raise ConfigError("optimizers: its parameters are not the model's: make it of model.parameters()")
    return several[0]


def _checked_seed(seed: int | None) -> int | None:
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"seed={seed!r}: it is a number, 0 or more")
    return seed


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
