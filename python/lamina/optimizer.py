# SPDX-License-Identifier: Apache-2.0
"""Ordinary optimizers of a distributed model."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina import _current
from lamina.errors import UsageError
from lamina.partitioning import PartitionedModel


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
        optimizer: any torch optimizer, made before or after the DistributedModel.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: not available yet: only the defaults.

    Returns:
        The same optimizer.

    Errors:
        UsageError: not an optimizer, a loss scale, or no `init`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if static_loss_scale != 1.0 or dynamic_loss_scale or dynamic_loss_args:
        raise UsageError("loss scaling is not available yet: DistributedOptimizer takes the optimizer alone")
    job = _current.job()
    if not any(known is optimizer for known in job.optimizers):
        job.optimizers.append(optimizer)
    if job.model is not None and job.model.partitioned:
        trim(optimizer, job.model._partitioned)
    return optimizer


def trim(optimizer: torch.optim.Optimizer, model: PartitionedModel) -> None:
    """Drops the parameters that other ranks own from `optimizer`, in place."""
    foreign = {id(tensor) for _, tensor, owner in model.tensors() if owner != model.partition}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in foreign:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) not in foreign]
