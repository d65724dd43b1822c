# SPDX-License-Identifier: Apache-2.0
"""The job of a Trainer: a model and its optimizer are spread at its beginning, and whole again at its end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.job import current
from lamina.job.lifetime import init, shutdown
from lamina.job.messages import barrier
from lamina.optim.optimizer import DistributedOptimizer
from lamina.pipeline.distributed_model import DistributedModel


class TrainerJob:
    """A job that trains this model with this optimizer. It ends the job before it, and that one's Trainer.

    Args:
        config: as `lamina.init` takes it.
        module: the model; values are those of world rank 0.
        optimizer: of its parameters.
        before_end: is called when the job is about to end.
    """

    def __init__(
        self,
        config: dict[str, Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        before_end: Callable[[], None],
    ):
        _end_current()
        init(config)
        self._before_end = before_end
        self._plain = dict(vars(optimizer))
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self.model = DistributedModel(module, average_grads_across_microbatches=False)
        self.optimizer = DistributedOptimizer(optimizer)
        self._added = vars(optimizer).keys() - self._plain.keys()
        current.job().own(_Trainers).latest = self

    def require(self, what: str) -> None:
        """UsageError where it has ended."""
        if not current.is_initialized() or current.job().model is not self.model:
            raise UsageError(f"{what}: this Trainer was closed, or another one was made after it")

    def end(self) -> None:
        """Ends the job, where it has not; every rank calls it. The model is the plain one again, with all values and
        buffers on every rank, and so is the optimizer, with all states."""
        if not current.is_initialized() or current.job().model is not self.model:
            return
        try:
            self._before_end()
        finally:
            self._make_whole()

    def _make_whole(self) -> None:
        values, states = self.model.state_dict(), self.optimizer.state_dict()
        barrier()
        shutdown()
        for name, parameter in self.model.module.named_parameters(remove_duplicate=False):
            parameter.grad = None
            parameter.data = values[name]
        for name in self._added:
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update({name: value for name, value in self._plain.items() if callable(value)})
        for group, parameters in zip(self.optimizer.param_groups, self._parameters, strict=True):
            group["params"] = parameters
        self.optimizer.state.clear()
        self.optimizer.load_state_dict({name: states[name] for name in ("state", "param_groups")})


class _Trainers:
    """The Trainer's job that a job of lamina's is, if it is one."""

    latest: TrainerJob | None = None


def _end_current() -> None:
    if not current.is_initialized():
        return
    if (latest := current.job().own(_Trainers).latest) is None:
        raise UsageError(
            "a Trainer begins its job itself: call no lamina.init(), its keys are Trainer(lamina_config={...})"
        )
    latest.end()
