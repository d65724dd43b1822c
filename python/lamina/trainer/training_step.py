# SPDX-License-Identifier: Apache-2.0
"""The step of a batch: forwards and backwards of its microbatches."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lamina._lamina import BatchRecord
from lamina.job.ranks import WORLD, rank
from lamina.job.seeds import set_rng_step
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import step
from lamina.trainer import microbatching
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
            microbatching.expect(state, share.everyone.most_samples)
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
            losses = {name: sum(values) for name, values in losses.items()}
            now = time.monotonic()
            everyone = self._together(losses, now - self._clock, lack is not None)
            if not everyone.lacks_memory:
                break
            kept.put_back()
            microbatching.halve(state, sorted({each for each in gathered(lack, WORLD) if each}))
        self._clock = now
        if everyone.names_differ:
            all_losses = added_up(of_each_copy(losses))
        else:
            all_losses = dict(zip(losses, everyone.losses, strict=True))
        state.total_loss_dict = {f"loss/train/{name}": loss for name, loss in all_losses.items()}
        return everyone.seconds

    def _together(self, losses: dict[str, float], seconds: float, lacks_memory: bool) -> BatchRecord:
        """The record of all ranks after a step, with rank 0's seconds and the sums of losses."""
        own = BatchRecord(is_after_step=True)
        own.name_losses(list(losses))
        own.lacks_memory, own.seconds = lacks_memory, 0.0 if rank() else seconds
        own.losses = list(losses.values()) if speaks() else []
        return together(own)

    @step
    def _step(self, batch: Any, part: float) -> dict[str, float]:
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
        return {name: loss.item() * part for name, loss in losses.items()}

    @torch.no_grad()
    def _update_train_metrics(self, counts: bool) -> None:
        state, model = self._state, self._state.model.module
        outputs = model.eval_forward(state.batch, state.outputs)  # a forward perhaps, of all copies
        for metric in state.train_metrics.values() if counts else ():
            model.update_metric(state.batch, outputs, metric)
