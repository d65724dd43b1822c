# SPDX-License-Identifier: Apache-2.0
"""The step of a batch: forwards and backwards of its microbatches."""

import copy
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lamina.job.ranks import WORLD, rank
from lamina.job.seeds import set_rng_step
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import step
from lamina.trainer import microbatching
from lamina.trainer.events import Event
from lamina.trainer.losses import added_up, loss_of, parts_of, require_trainable
from lamina.trainer.ranks import copies, gathered, of_each_copy, speaks, totals
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
            microbatching.expect(state, share.most)
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
            (seconds, *sums), (lacks, *names) = self._together(losses, now - self._clock, lack is not None)
            if not lacks:
                break
            kept.put_back()
            microbatching.halve(state, sorted({each for each in gathered(lack, WORLD) if each}))
        self._clock = now
        are_alike = names[0] == -names[1]
        all_losses = dict(zip(losses, sums, strict=True)) if are_alike else added_up(of_each_copy(losses))
        state.total_loss_dict = {f"loss/train/{name}": loss for name, loss in all_losses.items()}
        return seconds

    def _together(self, losses: dict[str, float], seconds: float, lacks: bool) -> tuple[list[float], list[float]]:
        """The numbers of all ranks after a step: rank 0's seconds and the sums of losses; whether memory is lacking,
        and a hash of their names and its negative, which tell whether names are alike."""
        names = float(zlib.crc32(repr(tuple(losses)).encode()))
        own = losses.values() if speaks() else ()
        return totals([0.0 if rank() else seconds, *own], [lacks, names, -names])

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
