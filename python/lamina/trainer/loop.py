# SPDX-License-Identifier: Apache-2.0
"""The loop: batches, updates and evaluations, in any layout."""

import datetime
from collections.abc import Callable, Iterator
from typing import Any

from lamina.errors import UsageError
from lamina.trainer import metrics
from lamina.trainer.events import Event
from lamina.trainer.shares import Share, Shares
from lamina.trainer.training_state import TrainingState
from lamina.trainer.training_step import TrainingStep

_CHECKPOINTS = {Event.BATCH_END: Event.BATCH_CHECKPOINT, Event.EPOCH_END: Event.EPOCH_CHECKPOINT}


class Loop:
    """Trains a model, and evaluates it.

    Args:
        state: its model is a DistributedModel whose losses add up over microbatches.
        engine: hears of all events.
        logger: gets the metrics.
        training_step: runs the step of a batch.
        measure: evaluates with an EvaluationData, see `Evaluation.run`.
        change: makes the change of the layout that was asked for, see `Layouts.change`.
    """

    def __init__(
        self,
        state: TrainingState,
        engine: Any,
        logger: Any,
        training_step: TrainingStep,
        measure: Callable[..., bool],
        change: Callable[[], bool],
    ):
        self._state, self._engine, self._logger = state, engine, logger
        self._step, self._measure, self._change = training_step, measure, change

    def fit(self, shares: Shares, most: int, steps_every_batch: bool) -> bool:
        """Trains until the state says that it is done.

        Args:
            shares: what is trained with.
            most: so many batches an epoch has at most, if it is not -1.
            steps_every_batch: whether schedulers make a step after each batch; else after each epoch.

        Returns:
            Whether a rank wants the training to end before.
        """
        state = self._state
        self._steps_every_batch = steps_every_batch
        self._step.begin()
        self._engine.run_event(Event.FIT_START)
        if state.unfinished is not None and not self._evaluate(*state.unfinished):
            return True
        while not state.is_done:
            state.model.train()
            if not state.timestamp.batch_in_epoch.value:
                self._engine.run_event(Event.EPOCH_START)
                self._logger.log_metrics({"epoch": state.timestamp.epoch.value})
            batches = shares.of_epoch(state.timestamp.epoch.value, most)
            while not state.is_done:
                if self._change():
                    batches = shares.of_epoch(state.timestamp.epoch.value, most)
                self._engine.run_event(Event.BEFORE_DATALOADER)
                if (share := next(batches, None)) is None:
                    break
                if not self._train(share) or share.everyone.stops:
                    return True
            if state.is_done and state.timestamp.batch_in_epoch != state.dataloader_len:
                break  # amid the epoch
            next(batches, None)  # the loader draws as much as where the training goes on
            if not state.timestamp.batch_in_epoch.value:
                why = "it is empty, or with drop_last no batch of all ranks was full"
                if isinstance(state.dataloader, Iterator):
                    why = "an iterator gives its batches once, a list or a DataLoader for each epoch"
                raise UsageError(f"the loader {state.dataloader_label!r} gave no batch: {why}")
            state.timestamp, state.dataloader_len = state.timestamp.to_next_epoch(), shares.batches(most)
            state.go_on_amid_epoch(False)
            for scheduler in [] if steps_every_batch else state.schedulers:
                scheduler.step()
            self._engine.run_event(Event.EPOCH_END)
            if not self._evaluate(Event.EPOCH_END):
                return True
        shares.end()
        self._engine.run_event(Event.FIT_END)
        if not self._evaluate(Event.FIT_END) or shares.end():
            return True
        self._change()
        return False

    def _train(self, share: Share) -> bool:
        """Trains with one batch of all copies, and evaluates what is due then; see `_evaluate`."""
        state = self._state
        state.batch = share.batch
        self._engine.run_event(Event.AFTER_DATALOADER)
        self._engine.run_event(Event.BATCH_START)
        self._engine.run_event(Event.BEFORE_TRAIN_BATCH)
        seconds = self._step.run(share)
        (optimizer,) = state.optimizers
        state.scaler.unscale_(optimizer)
        self._engine.run_event(Event.AFTER_TRAIN_BATCH)
        state.scaler.step(optimizer)
        state.scaler.update()
        if state.train_metrics:
            state.train_metric_values |= metrics.computed(state.train_metrics)
        self._logger.log_metrics(
            {
                "trainer/global_step": state.timestamp.batch.value,
                "trainer/batch_idx": state.timestamp.batch_in_epoch.value,
                **state.total_loss_dict,
                **{f"metrics/train/{name}": value for name, value in state.train_metric_values.items()},
            }
        )
        state.timestamp_before = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(
            share.everyone.samples, share.everyone.tokens, datetime.timedelta(seconds=seconds)
        )
        for scheduler in state.schedulers if self._steps_every_batch else []:
            scheduler.step()
        self._engine.run_event(Event.BATCH_END)
        return self._evaluate(Event.BATCH_END)

    def _evaluate(self, event: Event | str, first: int = 0) -> bool:
        """Evaluates what is due after an event, from evaluator number `first` on; then is the time of checkpoints.
        Returns whether it has ended: where a rank wants the training to end, it goes on with that evaluator."""
        state, event = self._state, Event(event)
        then = _CHECKPOINTS.get(event)
        for number, evaluator in enumerate(state.evaluators[first:], first):
            if evaluator.eval_interval(state, event) and not self._measure(evaluator, may_end=True):
                state.unfinished = then and (event.value, number)  # a training at its end evaluates again
                return False
        state.unfinished = None
        if then:
            self._engine.run_event(then)
        return True
