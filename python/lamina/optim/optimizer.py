# SPDX-License-Identifier: Apache-2.0
"""Ordinary optimizers of a distributed model."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState
from lamina.optim.shards import require_elementwise
from lamina.util.checks import require_booleans, require_positive


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Makes an optimizer of the whole model one of this rank's part of it.

    When the model is partitioned, parameters that other ranks own leave its parameter groups. The groups stay the same
    objects, and may end up empty.

    Args:
        optimizer: any torch optimizer that updates each parameter by itself, made before or after the DistributedModel.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: not available yet: only the defaults.

    Returns:
        The same optimizer, with the methods of `optimizer_state.OptimizerState`: `state_dict` is the whole optimizer's,
        `local_state_dict` that of this rank's part, and `load_state_dict` takes either.

    Errors:
        UsageError: not an optimizer, one that measures all parameters at once (LBFGS) over several partitions, a loss
            scale, or no `init`.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer, as {optimizer.__name__}(model.parameters()), not its class; the "
            "one that takes a class and remote parameters will be lamina.optim.DistributedOptimizer, not available yet"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    require_positive(static_loss_scale=static_loss_scale)
    require_booleans(dynamic_loss_scale=dynamic_loss_scale)
    if static_loss_scale != 1.0 or dynamic_loss_scale or dynamic_loss_args:
        raise UsageError("loss scaling is not available yet: DistributedOptimizer takes the optimizer alone")
    job = current.job()
    if job.pipelined and isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS measures all parameters of a model at once, and a rank has those of its partition: with several "
            "partitions take an optimizer that updates each parameter by itself",
            code="model-one-rank-optimizer",
        )
    state = next((known for known in job.optimizers if known.optimizer is optimizer), None)
    if state is None:
        state = OptimizerState(optimizer)
        state.install()
        job.optimizers.append(state)
    if job.session.config.sharded_data_parallel_degree > 1:
        require_elementwise(optimizer)
    if job.model is not None and job.model.partitioned:
        state.roster.trim(job.cut.model)
    return optimizer
