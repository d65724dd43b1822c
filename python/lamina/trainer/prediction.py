# SPDX-License-Identifier: Apache-2.0
"""Outputs of the model for data, without a loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lamina.job.ranks import set_num_microbatches
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.output import StepOutput
from lamina.pipeline.step import step
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.events import Event
from lamina.trainer.shares import Shares
from lamina.trainer.time import Timestamp
from lamina.trainer.training_state import TrainingState
from lamina.trainer.undisturbed import undisturbed
from lamina.util import pytree


class Prediction:
    """Calls the model of a state with batches.

    Args:
        engine: hears of events.
        precision: the context of forwards.
    """

    def __init__(self, state: TrainingState, engine: Any, precision: Callable[[], AbstractContextManager]):
        self._state, self._engine, self._precision = state, engine, precision

    def run(self, spec: DataSpec, most: int, keeps: bool) -> list[Any]:
        """Goes through the data, to batch number `most` at most, if it is not -1. The training goes on as if nothing
        had been. Returns the outputs for each batch of this rank's, on the host, where they are kept.

        Args:
            spec: what gives batches.
            most: how many of them are read; -1: all.
            keeps: whether outputs are returned.
        """
        state, kept = self._state, []
        read = state.dataloader, state.dataloader_label, state.dataloader_len
        with undisturbed(state.model, spec.dataloader):
            state.model.eval()
            shares = Shares(spec, False)
            set_num_microbatches(1)
            state.set_dataloader(spec, "predict", shares.batches(most))
            state.predict_timestamp = Timestamp()
            self._engine.run_event(Event.PREDICT_START)
            for share in shares.of_epoch(0, most):
                state.batch = share.batch
                self._engine.run_event(Event.PREDICT_BATCH_START)
                batch = Microbatches([state.batch]), Microbatches([share.counts])
                state.outputs, counts = _of_one(self._outputs(*batch))
                if keeps and counts:
                    kept.append(pytree.map_tensors(torch.Tensor.cpu, state.outputs))
                of_all = share.everyone
                state.predict_timestamp = state.predict_timestamp.to_next_batch(of_all.samples, of_all.tokens)
                self._engine.run_event(Event.PREDICT_BATCH_END)
            self._engine.run_event(Event.PREDICT_END)
        state.dataloader, state.dataloader_label, state.dataloader_len = read
        return kept

    @step
    @torch.no_grad()
    def _outputs(self, batch: Any, counts: int) -> tuple[Any, int]:
        """Calls the model. Ranks that follow hear how many samples of their copy's batch count."""
        self._state.batch = batch
        self._engine.run_event(Event.PREDICT_BEFORE_FORWARD)
        with self._precision():
            outputs = self._state.outputs = self._state.model(batch)
        self._engine.run_event(Event.PREDICT_AFTER_FORWARD)
        return outputs, counts


def _of_one(result: Any) -> Any:
    """The result of a step function for its one microbatch. What is no tensor is a list of one value there."""
    if isinstance(result, StepOutput):
        return result.outputs[0]
    children = pytree.children(result)
    if children is None or isinstance(result, (set, frozenset)):
        return result
    values = [value for _, value in children]
    if type(result) is list and len(values) == 1 and not _is_nested(values[0]):
        return values[0]
    return pytree.rebuild(result, [_of_one(value) for value in values])


def _is_nested(value: Any) -> bool:
    return isinstance(value, StepOutput) or pytree.children(value) is not None
