# SPDX-License-Identifier: Apache-2.0
"""The backwards that a script runs of its model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current


class Backwards:
    """The backwards of a job's model.

    Args:
        job: the current one.
        average: whether those in a step divide gradients by the number of microbatches.
    """

    def __init__(self, job: current.Job, average: bool):
        self._average = average
        self._watch = _lamina.BackwardWatch(job.microbatches if average else 1)

    def run(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None,
    ) -> None:
        """One backward: see `DistributedModel.backward`."""
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if grad_tensors is None:
            gradients = [None] * len(outputs)
        else:
            gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        if len(gradients) != len(outputs):
            raise UsageError(f"backward: {len(outputs)} tensors, but {len(gradients)} gradients")
        job = current.job()
        self._watch.announce()
        if job.uneven is not None and current.in_step():
            raise UsageError(str(job.uneven), code="step-uneven")
        scale = 1 / job.microbatches if self._average and current.in_step() and not _hooked(job) else 1.0
        with job.replicas.backward() if job.replicas is not None else nullcontext():
            if job.pipelined:
                job.session.backward(outputs, gradients, scale)
            else:
                given = [_scaled(*pair, scale) for pair in zip(outputs, gradients, strict=True)]
                torch.autograd.backward(outputs, given)

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Around a step: tells, once, of a backward of this module's parameters that is not the model's."""
        job = current.job()
        if self._watch.over or _hooked(job) or not job.leads:
            yield
            return
        parameters = list(module.parameters())
        self._watch.begin_step(parameters, job.session.backwards())
        yield
        self._watch.end_step(parameters, job.session.backwards())


def _hooked(job: current.Job) -> bool:
    """True where a communication hook makes the gradients what they become, and nothing else averages them."""
    return job.replicas is not None and job.replicas.hooked


def _scaled(output: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    if gradient is not None:
        return gradient * scale
    return torch.full_like(output, scale) if output.numel() == 1 else None  # torch says what is missing
