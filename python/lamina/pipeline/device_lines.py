# SPDX-License-Identifier: Apache-2.0
"""Lends the engine what it knows of the memory of the rank's device: see exits/device_errors.py."""

import gc

import torch
from torch import nn

from lamina import _lamina
from lamina.exits import device_errors
from lamina.job import current
from lamina.util import pytree


def _of_full_memory(module: nn.Module | None) -> str:
    job = current.job_if_any()
    if job is None:
        return ""
    model = job.partitioned_model
    return _lamina.told_of_full_memory(
        job.session,
        None if model is None else model.table,
        None if model is None else model.sharding,
        list(job.model.parameters()) if model is None else [],
        _states_of_optimizers(),
        "" if module is None else _name(module),
    )


def _of_failed_kernel(_: nn.Module | None) -> str:
    job = current.job_if_any()
    return "" if job is None else _lamina.told_of_failed_kernel(job.session)


def _name(module: nn.Module) -> str:
    """Its name in the model, else that of its class."""
    names = {id(each): name for name, each in current.job().model.module.named_modules()}
    return names.get(id(module)) or type(module).__name__


def _states_of_optimizers() -> list[torch.Tensor]:
    """Lists those of all optimizers of the process: a job knows its own, and scripts may have others."""
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return pytree.tensors([list(each.state.values()) for each in optimizers])


device_errors.tell_by(_of_full_memory, _of_failed_kernel)
