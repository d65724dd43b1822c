# SPDX-License-Identifier: Apache-2.0
"""Calls of a pipeline's model outside of step functions, without gradients: an evaluation as plain scripts have it."""

import ctypes
import hashlib
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.step import StepFunction
from lamina.util import pytree


class OutsideCalls(StepFunction):
    """Calls of the model that all ranks of a pipeline make with the same arguments. Each is a step of one microbatch,
    whose result all of them get as the model has returned it. The training goes on as if nothing had been: with the
    random numbers that it would have had, and with no step more."""

    is_of_training = False

    def __init__(self):
        super().__init__(_forward, (), {}, detach_outputs=True)
        self.name = "a call of the model outside of step functions"
        self._calls = 0  # each draws other random numbers

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns what the model returns.

        Errors:
            UsageError: on a rank whose arguments are not those of the rank that leads.
            DesyncError: another rank of the pipeline makes another call.
        """
        session = current.outside_step("the model").session
        own = _digest((args, kwargs))
        steps = session.seeded_steps
        self._calls += 1
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed((torch.initial_seed() + self._calls) % 2**63)
            if steps is not None:
                session.seeded_steps = steps + 2**40 + self._calls
            try:
                output, given = self(Microbatches([(args, kwargs, own)]))
            finally:
                if steps is not None:
                    session.seeded_steps = steps
        if own != given:
            raise UsageError(
                "outside of step functions the model was called with another batch than on the rank that leads the "
                "pipeline, whose result all of its ranks get: read the same data on all ranks of a pipeline, as a "
                "sampler of lamina.dist.get_sampler(data) does: docs/evaluation.md",
                code="step-other-batch",
            )
        return output

    def _merge(self, job: current.Job, outputs: list[Any], samples: list[int]) -> Any:
        return outputs[0]


def _forward(call: tuple[tuple, dict[str, Any], str]) -> tuple[Any, str]:
    """Returns what the model makes of the arguments of the rank that leads, and their digest."""
    args, kwargs, digest = call
    with torch.no_grad():
        return current.job().model.forward(*args, **kwargs), digest


def _digest(values: Any) -> str:
    """Tells apart values whose tensors differ."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in pytree.tensors(values):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
            dense = tensor.detach().cpu().contiguous()
            found.update(ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b"")
    return found.hexdigest()
