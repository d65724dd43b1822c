# SPDX-License-Identifier: Apache-2.0
"""Evaluations, beside a training or alone."""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from lamina.errors import ConfigError, UsageError
from lamina.job.ranks import WORLD, set_num_microbatches
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import step
from lamina.trainer import measured, metrics
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.events import Event
from lamina.trainer.job import Method
from lamina.trainer.losses import loss_of, parts_of
from lamina.trainer.ranks import gathered, of_each_copy
from lamina.trainer.shares import Shares
from lamina.trainer.time import Timestamp
from lamina.trainer.training_state import TrainingState
from lamina.trainer.undisturbed import undisturbed


class EvaluationData(Protocol):
    """Data of an evaluation: composer's Evaluator.

    Attributes:
        label: its name.
        dataloader: what gives batches.
        subset_num_batches: how many are read; -1: all.
        eval_interval: tells, of a state and an event, whether the evaluation is due then.
    """

    label: str
    dataloader: DataSpec
    subset_num_batches: int
    eval_interval: Callable[[TrainingState, Event], bool]


class Evaluation:
    """Evaluates the model of a state.

    Args:
        engine: hears of events.
        logger: gets the metrics.
        precision: the context of forwards and losses.
        by_tokens: whether losses count by their tokens, where a function counts those; else by their samples.
    """

    def __init__(
        self,
        state: TrainingState,
        engine: Any,
        logger: Any,
        precision: Callable[[], AbstractContextManager],
        by_tokens: bool,
    ):
        self._state, self._engine, self._logger, self._precision = state, engine, logger, precision
        self._by_tokens = by_tokens

    def run(self, evaluator: EvaluationData, may_end: bool = False, most: int | None = None) -> bool:
        """Measures the model's metrics over an evaluator's data, or where it has none its loss; over `most` batches, if
        that is not the evaluator's number. The training goes on as if nothing had been. Returns whether it is whole:
        with `may_end` it ends where a rank wants the training to end, and has no values.

        Args:
            evaluator: its data, and their label.
            may_end: whether it ends where a rank wants the training to end.
            most: how many batches are read, in the place of the evaluator's number; -1: all.
        """
        state = self._state
        read = state.dataloader, state.dataloader_label, state.dataloader_len
        try:
            return self._run(evaluator, may_end, most)
        finally:
            state.dataloader, state.dataloader_label, state.dataloader_len = read

    def _run(self, evaluator: EvaluationData, may_end: bool, most: int | None) -> bool:
        state, spec = self._state, evaluator.dataloader
        self._metrics = metrics.fresh(state.eval_metrics[evaluator.label])
        total, counts, since, is_whole = 0.0, 0, time.monotonic(), True
        with undisturbed(state.model, spec.dataloader):
            state.model.eval()
            shares = Shares(spec, self._by_tokens and spec.counts_tokens and not self._metrics)
            set_num_microbatches(1)
            state.set_dataloader(spec, evaluator.label, shares.batches())
            state.eval_timestamp = Timestamp()
            self._engine.run_event(Event.EVAL_START)
            for share in shares.of_epoch(0, evaluator.subset_num_batches if most is None else most):
                if not (is_whole := not (may_end and share.everyone.stops)):
                    break
                state.batch = share.batch
                self._engine.run_event(Event.EVAL_BATCH_START)
                total += measured.added(self._measure(Microbatches([state.batch]), Microbatches([share.counts])))
                counts += share.all_counts
                of_all = share.everyone
                state.eval_timestamp = state.eval_timestamp.to_next_batch(of_all.samples, of_all.tokens)
                self._engine.run_event(Event.EVAL_BATCH_END)
            if is_whole:
                _require_counted(evaluator, state.eval_timestamp, counts)
                if self._metrics:
                    values = measured.plain(metrics.computed(self._metrics))
                else:
                    values = {"loss": sum(of_each_copy(measured.plain(total))) / counts}
        if is_whole:
            self._tell(evaluator, values, time.monotonic() - since)
        return is_whole

    def _tell(self, evaluator: EvaluationData, values: dict[str, Any], seconds: float) -> None:
        """Says what was measured, and how long it took."""
        state, elapsed = self._state, datetime.timedelta(seconds=gathered(seconds, WORLD)[0])
        state.eval_timestamp = state.eval_timestamp.copy(total_wct=elapsed, epoch_wct=elapsed)
        state.eval_metrics[evaluator.label] = self._metrics
        state.eval_metric_values |= values
        self._logger.log_metrics({f"metrics/{evaluator.label}/{name}": value for name, value in values.items()})
        self._engine.run_event(Event.EVAL_END)

    @step
    @torch.no_grad()
    def _measure(self, batch: Any, counts: int) -> float | torch.Tensor:
        """Adds a batch to the metrics; without any it returns its loss times what counts of it."""
        state, model = self._state, self._state.model.module
        state.batch = batch
        self._engine.run_event(Event.EVAL_BEFORE_FORWARD)
        with self._precision():
            state.outputs = state.model(Method("eval_forward"), batch)
        self._engine.run_event(Event.EVAL_AFTER_FORWARD)
        if not self._metrics:
            with self._precision():
                loss = loss_of(model, state.outputs, batch)
            return measured.times(parts_of(loss)["total"], counts) if counts else 0.0
        for metric in self._metrics.values() if counts else ():
            model.update_metric(batch, state.outputs, metric)
        return 0.0


def require_batches(evaluator: EvaluationData) -> None:
    """Raises where it is known that an evaluation would read nothing, or all copies the same."""
    if Shares(evaluator.dataloader).batches() == 0:
        raise _nothing(evaluator, ConfigError)


def _require_counted(evaluator: EvaluationData, time: Timestamp, counts: int) -> None:
    """Raises where an evaluation has read nothing, or nothing that counts: it has no value."""
    if not time.batch.value:
        raise _nothing(evaluator, UsageError)
    if not counts:
        raise UsageError(
            f"the evaluation {evaluator.label!r} has no value: none of its {time.sample} counts, as "
            "DataSpec(get_num_samples_in_batch=..., get_num_tokens_in_batch=...) count them"
        )


def _nothing(evaluator: EvaluationData, kind: type) -> Exception:
    if isinstance(evaluator.dataloader.dataloader, Iterator):
        why = "an iterator gives its batches once, a list or a DataLoader for each evaluation"
    else:
        why = "it is empty, or with drop_last no batch of all ranks was full"
    return kind(f"the evaluation {evaluator.label!r} has no value, for its loader gives no batch: {why}")
