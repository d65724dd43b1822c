# SPDX-License-Identifier: Apache-2.0
"""The loop: batches, updates and evaluations, in any layout."""

import datetime
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lamina.errors import UsageError
from lamina.trainer import metrics
from lamina.trainer.events import Event
from lamina.trainer.shares import Share, Shares
from lamina.trainer.training_state import TrainingState
from lamina.trainer.training_step import TrainingStep

_CHECKPOINTS = {Event.BATCH_END: Event.BATCH_CHECKPOINT, Event.EPOCH_END: Event.EPOCH_CHECKPOINT}
_AFTER, _NEXT, _LAST = range(3)  # what begins, a batch or an epoch; the next batch; the end of the training


class Place(NamedTuple):
    """A place in the loop where it may go on, in the order in which they come while the time stands.

    Attributes:
        part: after something, before the next batch, or at the end.
        number: in these: 0 the event itself, then the evaluations by their numbers, and one for checkpoints.
    """

    part: int
    number: int

    @property
    def is_before_batch(self) -> bool:
        """Tells whether the next thing is a batch."""
        return self.part == _NEXT

    @property
    def is_last(self) -> bool:
        """Tells whether it is at the end of the training."""
        return self.part == _LAST

    @classmethod
    def before_batch(cls) -> "Place":
        """Gives that of the next batch."""
        return cls(_NEXT, 0)

    @classmethod
    def first(cls) -> "Place":
        """Gives the first one of a time."""
        return cls(_AFTER, 0)

    @classmethod
    def of_checkpoint(cls, evaluators: int) -> "Place":
        """Gives that of checkpoints, after so many evaluators."""
        return cls(_AFTER, 1 + evaluators)


class Loop:
    """Trains a model, and evaluates it.

    Args:
        state: its model is a DistributedModel whose losses add up over microbatches.
        engine: hears of all events.
        logger: gets the metrics.
        training_step: runs the step of a batch.
        measure: evaluates with an EvaluationData, see `Evaluation.run`.
        change: makes the change of the layout that was asked for, see `Layouts.change`.

    Attributes:
        place: where it is.
        after: the event that began the time of now: of the beginning, a batch or an epoch.
        when_there: is called with each place.
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
        self.place, self.after = Place.first(), Event.FIT_START
        self.when_there: Callable[[Place], None] = lambda place: None
        self._steps_every_batch = True

    def begin(self, steps_every_batch: bool) -> None:
        """A training begins.

        Args:
            steps_every_batch: whether schedulers make a step after each batch; else after each epoch.
        """
        self._steps_every_batch = steps_every_batch
        self._step.begin()

    def fit(self, shares: Shares, most: int) -> bool:
        """Trains until the state says that it is done.

        Args:
            shares: what is trained with.
            most: so many batches an epoch has at most, if it is not -1.

        Returns:
            Whether a rank wants the training to end before.
        """
        self._begin(Event.FIT_START)
        return self.go_on(shares, most, False)

    def go_on(self, shares: Shares, most: int, is_again: bool = True) -> bool:
        """As `fit`, from its place on.

        Args:
            shares, most: see `fit`.
            is_again: whether it was at that place before.
        """
        if self.place.part == _AFTER and not self._hear_and_evaluate():
            return True
        if self.place.part != _LAST and self._train_on(shares, most, is_again):
            return True
        if self.place.part != _LAST:
            shares.end()
            self._go_to(Place(_LAST, 0))
        if not self.place.number:
            self._engine.run_event(Event.FIT_END)
        if not self._evaluate(Event.FIT_END, self._first()) or shares.end():
            return True
        self._change()
        return False

    def _begin(self, after: Event) -> None:
        """A time begins."""
        self.after = after
        self._go_to(Place.first())

    def _go_to(self, place: Place) -> None:
        self.place = place
        self.when_there(place)

    def _first(self) -> int:
        """The first evaluator that is due."""
        return max(self.place.number - 1, 0)

    def _hear_and_evaluate(self) -> bool:
        """The event that began the time of now, and what is due after it; see `_evaluate`."""
        if not self.place.number:
            self._engine.run_event(self.after)
        if self.after is not Event.FIT_START:
            return self._evaluate(self.after, self._first())
        if self._state.unfinished is None:
            return True
        after, first = self._state.unfinished
        self.after = Event(after)
        return self._evaluate(self.after, first)

    def _train_on(self, shares: Shares, most: int, is_again: bool) -> bool:
        """Trains until the state says that it is done. Returns whether a rank wants that before."""
        state, is_amid = self._state, is_again and self.after is Event.BATCH_END
        while is_amid or not state.is_done:
            if not is_amid:
                state.model.train()
            is_amid = False  # of an epoch, which it ends in any case
            if not state.timestamp.batch_in_epoch.value:
                self._go_to(Place.before_batch())
                self._engine.run_event(Event.EPOCH_START)
                self._logger.log_metrics({"epoch": state.timestamp.epoch.value})
            batches = shares.of_epoch(state.timestamp.epoch.value, most)
            while not state.is_done:
                self._go_to(Place.before_batch())
                if self._change():
                    self._go_to(Place.before_batch())
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
            for scheduler in [] if self._steps_every_batch else state.schedulers:
                scheduler.step()
            self._begin(Event.EPOCH_END)
            if not self._hear_and_evaluate():
                return True
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
        if state.train_metrics:  # before the update, after which no rank needs another one for this batch
            state.train_metric_values |= metrics.computed(state.train_metrics)
        state.scaler.step(optimizer)
        state.scaler.update()
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
        self._begin(Event.BATCH_END)
        return self._hear_and_evaluate()

    def _evaluate(self, event: Event, first: int) -> bool:
        """Evaluates what is due after an event, from evaluator number `first` on; then is the time of checkpoints.
        Returns whether it has ended: where a rank wants the training to end, it goes on with that evaluator."""
        state = self._state
        then = _CHECKPOINTS.get(event)
        for number, evaluator in enumerate(state.evaluators[first:], first):
            if evaluator.eval_interval(state, event):
                self._go_to(Place(self.place.part, 1 + number))
                if not self._measure(evaluator, may_end=True):
                    state.unfinished = then and (event.value, number)  # a training at its end evaluates again
                    return False
        state.unfinished = None
        if then:
            self._go_to(Place.of_checkpoint(len(state.evaluators)))
            self._engine.run_event(then)
        return True
