# SPDX-License-Identifier: Apache-2.0
"""The loop: batches, updates and evaluations, in any layout."""

import datetime
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.job.ranks import WORLD, num_microbatches, rank, set_num_microbatches
from lamina.job.seeds import set_rng_step
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import step
from lamina.trainer import metrics, microbatching
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.evaluator import Evaluator
from lamina.trainer.events import Engine, Event
from lamina.trainer.job import Method
from lamina.trainer.precision import get_precision_context
from lamina.trainer.settings import Settings
from lamina.trainer.shares import Share, Shares, copies, gathered, leads, own_copy, sum_over_copies
from lamina.trainer.state import State
from lamina.trainer.time import Timestamp
from lamina.trainer.undisturbed import Kept, undisturbed


class Loop:
    """Trains a model, and evaluates it.

    Args:
        state: its model is a DistributedModel whose losses add up over microbatches.
        engine: hears of all events.
        logger: gets the metrics.
        settings: of numbers and layouts.
        by_tokens: whether microbatches count by their tokens; else by their samples.
    """

    def __init__(self, state: State, engine: Engine, logger: Any, settings: Settings, by_tokens: bool):
        self._by_tokens = by_tokens
        self._settings = settings
        self._state, self._engine, self._logger = state, engine, logger
        self._fills = current.session().needs_all_microbatches
        self._seeded = current.session().seeded_steps is not None

    def fit(self, spec: DataSpec, shares: Shares, most: int, steps_every_batch: bool) -> bool:
        """Trains until the state says that it is done.

        Args:
            shares: of the loader that `spec` describes.
            most: so many batches an epoch has at most, if it is not -1.
            steps_every_batch: whether schedulers make a step after each batch; else after each epoch.

        Returns:
            Whether a rank wants the training to end before.
        """
        state = self._state
        self._steps_every_batch, self._clock = steps_every_batch, time.monotonic()
        state.begin()
        self._engine.run_event(Event.FIT_START)
        while not state.is_done:
            state.model.train()
            if not state.timestamp.batch_in_epoch.value:
                self._engine.run_event(Event.EPOCH_START)
                self._logger.log_metrics({"epoch": state.timestamp.epoch.value})
            batches = shares.of_epoch(state.timestamp.epoch.value, most)
            while not state.is_done:
                self._engine.run_event(Event.BEFORE_DATALOADER)
                if (share := next(batches, None)) is None:
                    break
                self._train(spec, share)
                if share.stops:
                    return True
            if state.is_done and state.timestamp.batch_in_epoch != state.dataloader_len:
                break  # amid the epoch
            next(batches, None)  # the loader draws as much as where the training goes on
            if not state.timestamp.batch_in_epoch.value:
                raise UsageError(
                    f"the loader {state.dataloader_label!r} gave no batch: with drop_last, none of all ranks was full"
                )
            state.timestamp = state.timestamp.to_next_epoch()
            for scheduler in [] if steps_every_batch else state.schedulers:
                scheduler.step()
            self._engine.run_event(Event.EPOCH_END)
            self._evaluate(Event.EPOCH_END)
            self._engine.run_event(Event.EPOCH_CHECKPOINT)
        self._engine.run_event(Event.FIT_END)
        self._evaluate(Event.FIT_END)
        return any(gathered(shares.stops, WORLD))

    def _train(self, spec: DataSpec, share: Share) -> None:
        """Trains with one batch of all copies."""
        state = self._state
        state.batch = spec.device_transforms(share.batch) if leads() else None
        self._engine.run_event(Event.AFTER_DATALOADER)
        self._engine.run_event(Event.BATCH_START)
        self._engine.run_event(Event.BEFORE_TRAIN_BATCH)
        seconds = self._run(spec, share)
        (optimizer,) = state.optimizers
        state.scaler.unscale_(optimizer)
        self._engine.run_event(Event.AFTER_TRAIN_BATCH)
        if self._settings.clipping_norm is not None:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), self._settings.clipping_norm)
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
            share.all_samples, share.all_tokens, datetime.timedelta(seconds=seconds)
        )
        for scheduler in state.schedulers if self._steps_every_batch else []:
            scheduler.step()
        self._engine.run_event(Event.BATCH_END)
        self._evaluate(Event.BATCH_END)
        self._engine.run_event(Event.BATCH_CHECKPOINT)

    def _run(self, spec: DataSpec, share: Share) -> float:
        """Runs the step of a batch. Where memory is lacking on a rank, all run it again with smaller microbatches, if
        they may. Returns rank 0's seconds since the batch before."""
        state = self._state
        (optimizer,) = state.optimizers
        while True:
            kept = Kept(state.model) if state.auto_microbatching else None
            microbatching.expect(state, share.most)
            for metric in state.train_metrics.values():
                metric.reset()
            optimizer.zero_grad(set_to_none=True)
            if self._seeded:
                set_rng_step(state.timestamp.batch.value)  # whatever failed, or was evaluated
            microbatches, parts = self._cut(spec, share) if leads() else ([None], [0.0])
            losses, lack = {}, None
            try:
                losses = self._step(Microbatches(microbatches), Microbatches(parts))
            except Exception as error:
                if kept is None or not microbatching.is_out_of_memory(error):
                    raise
                lack = getattr(error, "rank", rank()), str(error).partition("\n")[0] or type(error).__name__
            losses = {name: sum(values) for name, values in losses.items()}
            now = time.monotonic()
            words = gathered((own_copy(), losses, now - self._clock, lack), WORLD)
            if not any(word[-1] for word in words):
                break
            kept.put_back()
            microbatching.halve(state, sorted({word[-1] for word in words if word[-1]}))
        self._clock = now
        state.total_loss_dict = _totals({number: of_copy for number, of_copy, *_ in words})
        return words[0][2]

    def _cut(self, spec: DataSpec, share: Share) -> tuple[list[Any], list[float]]:
        """The microbatches of this copy, and which part each is of the batch of all copies."""
        state = self._state
        size, pieces = state.device_train_microbatch_size, state.grad_accum or 1
        microbatches = spec.microbatches(state.batch, share.samples, size, pieces)
        if share.samples:
            count = spec.get_num_tokens_in_batch if self._by_tokens else spec.get_num_samples_in_batch
            whole = share.all_tokens if self._by_tokens else share.all_samples
            if not whole:
                raise UsageError("a batch without tokens: DataSpec(loader, get_num_tokens_in_batch=...) counts them")
            parts = [count(microbatch) / whole for microbatch in microbatches]
        else:
            parts = [0.0]  # of one that nothing counts of
        return self._filled(microbatches, parts)

    def _filled(self, microbatches: list[Any], parts: list[float]) -> tuple[list[Any], list[float]]:
        """As many microbatches as all copies have, where shards need that: of those that are added nothing counts."""
        missing = num_microbatches() - len(parts) if self._fills else 0
        return [*microbatches, *microbatches[-1:] * missing], [*parts, *[0] * missing]

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
            state.loss = state.model.module.loss(state.outputs, state.batch)
        run(Event.AFTER_LOSS)
        run(Event.BEFORE_BACKWARD)
        losses = _losses(state.loss)
        state.model.backward(state.scaler.scale(losses["total"] * (part * copies())))
        run(Event.AFTER_BACKWARD)
        if part:
            self._update_train_metrics()
        return {name: loss.item() * part for name, loss in losses.items()}

    @torch.no_grad()
    def _update_train_metrics(self) -> None:
        state, model = self._state, self._state.model.module
        outputs = model.eval_forward(state.batch, state.outputs) if state.train_metrics else None
        for metric in state.train_metrics.values():
            model.update_metric(state.batch, outputs, metric)

    def _evaluate(self, event: Event) -> None:
        """Evaluates what is due."""
        for evaluator in self._state.evaluators:
            if evaluator.eval_interval(self._state, event):
                self.evaluate(evaluator)

    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]:
        """The model's metrics over an evaluator's data, or where it has none its loss. The training goes on as if
        nothing had been."""
        state, spec = self._state, evaluator.dataloader
        read = state.dataloader, state.dataloader_label, state.dataloader_len
        measured = self._measured = metrics.fresh(state.eval_metrics[evaluator.label])
        total = samples = 0.0
        with undisturbed(state.model):
            state.model.eval()
            shares = Shares(spec)
            set_num_microbatches(1)
            state.set_dataloader(spec, evaluator.label, shares.length)
            state.eval_timestamp = Timestamp()
            self._engine.run_event(Event.EVAL_START)
            for share in shares.of_epoch(0, evaluator.subset_num_batches):
                state.batch = spec.device_transforms(share.batch) if leads() else None
                self._engine.run_event(Event.EVAL_BATCH_START)
                total += sum(self._measure(Microbatches([state.batch]), Microbatches([share.samples])))
                samples += share.all_samples
                state.eval_timestamp = state.eval_timestamp.to_next_batch(share.all_samples, share.all_tokens)
                self._engine.run_event(Event.EVAL_BATCH_END)
            values = metrics.computed(measured) if measured else {"loss": sum_over_copies(total) / max(samples, 1)}
        state.eval_metrics[evaluator.label] = measured
        state.eval_metric_values |= values
        self._logger.log_metrics({f"metrics/{evaluator.label}/{name}": value for name, value in values.items()})
        self._engine.run_event(Event.EVAL_END)
        state.dataloader, state.dataloader_label, state.dataloader_len = read
        return values

    @step
    @torch.no_grad()
    def _measure(self, batch: Any, samples: int) -> float:
        """Adds a batch to the metrics; without any it returns the sum of its loss over samples."""
        state, model, measured = self._state, self._state.model.module, self._measured
        state.batch = batch
        self._engine.run_event(Event.EVAL_BEFORE_FORWARD)
        with self._precision():
            state.outputs = state.model(Method("eval_forward"), batch)
        self._engine.run_event(Event.EVAL_AFTER_FORWARD)
        if not samples:
            return 0.0
        for metric in measured.values():
            model.update_metric(batch, state.outputs, metric)
        with self._precision():
            return 0.0 if measured else _losses(model.loss(state.outputs, batch))["total"].item() * samples

    def _precision(self) -> AbstractContextManager:
        return get_precision_context(self._settings.autocast, "cpu")


def _losses(loss: Any) -> dict[str, torch.Tensor]:
    """The parts of a loss, by name, and their sum "total"."""
    if isinstance(loss, Mapping):
        parts = {name: part.mean() for name, part in loss.items()}
    elif isinstance(loss, (list, tuple)):
        parts = {f"loss{number}": part.mean() for number, part in enumerate(loss)}
    else:
        return {"total": loss.mean()}
    return parts if "total" in parts else parts | {"total": sum(parts.values())}


def _totals(of_copies: dict[int, dict[str, float]]) -> dict[str, float]:
    """The losses of all copies of the model together."""
    ordered = [of_copies[copy] for copy in sorted(of_copies)]
    return {f"loss/train/{name}": sum(losses[name] for losses in ordered) for name in ordered[0]}
