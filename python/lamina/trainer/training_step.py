# SPDX-License-Identifier: Apache-2.0
"""The step of a batch: forwards and backwards of its microbatches."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lamina._lamina import BatchRecord, sum_of_copies
from lamina.job import current
from lamina.job.ranks import WORLD, rank, size
from lamina.job.seeds import set_rng_step
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import step
from lamina.trainer import measured, microbatching
from lamina.trainer.events import Event
from lamina.trainer.losses import added_up, loss_of, parts_of, require_trainable
from lamina.trainer.ranks import copies, gathered, of_each_copy, speaks, together
from lamina.trainer.shares import Share
from lamina.trainer.training_state import TrainingState
from lamina.trainer.undisturbed import Kept


class TrainingStep:
    """Runs batches of a training, but for the updates.

    Args:
        state: its model is a DistributedModel whose losses add up over microbatches.
        engine: hears of events.
        precision: the context of forwards and losses.
    """

    def __init__(self, state: TrainingState, engine: Any, precision: Callable[[], AbstractContextManager]):
        self._state, self._engine, self._precision = state, engine, precision
        self.begin()

    def begin(self) -> None:
        """A training begins: the time of its first batch counts from here on."""
        self._clock = time.monotonic()

    def run(self, share: Share) -> float:
        """Runs the step of a batch. Where memory is lacking on a rank, all run it again with smaller microbatches, if
        they may. Returns rank 0's seconds since the batch before."""
        state = self._state
        (optimizer,) = state.optimizers
        batch = state.batch
        while True:
            kept = Kept(state.model) if state.auto_microbatching else None
            state.batch = batch if kept is None else copy.deepcopy(batch)  # a model may write to it
            microbatching.expect(state, share)
            for metric in state.train_metrics.values():
                metric.reset()
            optimizer.zero_grad(set_to_none=True)
            set_rng_step(state.timestamp.batch.value)  # whatever failed, or was evaluated
            microbatches, parts = microbatching.cut(state, share)
            losses, lack = {}, None
            try:
                losses = self._step(Microbatches(microbatches), Microbatches(parts))
            except Exception as error:
                if kept is None or not microbatching.is_out_of_memory(error):
                    raise
                lack = getattr(error, "rank", rank()), str(error).partition("\n")[0] or type(error).__name__
            losses = {name: measured.added(values) for name, values in losses.items()}
            on_device = size() > 1 and measured.are_on_device(losses.values())
            losses = losses if size() == 1 or on_device else measured.plain(losses)  # ranks tell each other numbers
            now = time.monotonic()
            everyone = self._together(losses, on_device, now - self._clock, lack is not None)
            if not everyone.lacks_memory:
                break
            kept.put_back()
            microbatching.halve(state, sorted({each for each in gathered(lack, WORLD) if each}))
        self._clock = now
        sums = self._sums(losses, on_device, everyone)
        state.total_loss_dict = {f"loss/train/{name}": loss for name, loss in sums.items()}
        return everyone.seconds

    def _sums(self, losses: dict[str, Any], on_device: bool, everyone: BatchRecord) -> dict[str, Any]:
        """The losses of all copies, added up where they are."""
        if size() == 1:
            return losses
        if everyone.names_differ:
            return added_up(of_each_copy(measured.plain(losses)))
        if not on_device:
            return dict(zip(losses, everyone.losses, strict=True))
        if copies() == 1:
            return losses
        own = torch.stack(list(losses.values()))
        return dict(zip(losses, sum_of_copies(current.session(), own).unbind(), strict=True))

    def _together(self, losses: dict[str, Any], on_device: bool, seconds: float, lacks_memory: bool) -> BatchRecord:
        """The record of all ranks after a step, with rank 0's seconds and the sums of losses."""
        own = BatchRecord(is_after_step=True)
        own.name_losses([f"{name} of a device" for name in losses] if on_device else list(losses))
        own.lacks_memory, own.seconds = lacks_memory, 0.0 if rank() else seconds
        own.losses = list(losses.values()) if speaks() and size() > 1 and not on_device else []
        return together(own)

    @step
    def _step(self, batch: Any, part: float) -> dict[str, float | torch.Tensor]:
        """Runs a microbatch, which is such a part of the batch of all copies. Returns its part of the losses. Gradients
        are averaged over the copies, and added up over microbatches."""
        state, run, state.batch = self._state, self._engine.run_event, batch
        run(Event.BEFORE_FORWARD)
        with self._precision():
            state.outputs = state.model(state.batch)
        run(Event.AFTER_FORWARD)
        run(Event.BEFORE_LOSS)
        with self._precision():
            state.loss = loss_of(state.model.module, state.outputs, state.batch)
        run(Event.AFTER_LOSS)
        run(Event.BEFORE_BACKWARD)
        losses, weight = parts_of(state.loss), part * copies()
        require_trainable(losses["total"])
        total = losses["total"] if weight == 1 else losses["total"] * weight  # an operation less, forward and backward
        state.model.backward(state.scaler.scale(total))
        run(Event.AFTER_BACKWARD)
        if state.train_metrics:
            self._update_train_metrics(bool(part))
        return {name: measured.times(loss, part) for name, loss in losses.items()}

    @torch.no_grad()
    def _update_train_metrics(self, counts: bool) -> None:
        state, model = self._state, self._state.model.module
        outputs = model.eval_forward(state.batch, state.outputs)  # a forward perhaps, of all copies
        for metric in state.train_metrics.values() if counts else ():
            model.update_metric(state.batch, outputs, metric)
