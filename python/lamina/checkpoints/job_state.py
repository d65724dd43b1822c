# SPDX-License-Identifier: Apache-2.0
"""A job as checkpoints see it: whether it can be saved, how its ranks share the work, what it trains."""

import importlib.metadata
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState


def require_ready(job: current.Job, model: Any) -> None:
    """UsageError where there is nothing that could be saved, or not now."""
    if job.model is None:
        raise UsageError("save_checkpoint(): there is no DistributedModel yet", code="checkpoint-no-model")
    if model is not None and model is not job.model:
        raise UsageError("save_checkpoint(): `model` is not this job's DistributedModel", code="checkpoint-no-model")
    if not job.model.partitioned:
        raise UsageError(
            "save_checkpoint() before the model is partitioned, which its first step does: there is nothing yet that "
            "its initial values do not say",
            code="state-before-cut",
        )
    if job.replicas is not None and job.replicas.reducer.accumulates:
        raise UsageError(
            "save_checkpoint() between the backward passes of one reduction (backward_passes_per_step): gradients that "
            "a checkpoint does not have would be lost. Save after the pass in which they are averaged",
            code="checkpoint-accumulates",
        )


def persistent(module: torch.nn.Module) -> Any:
    """(name, tensor) of all that a module's state dict has, under all names."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def layout(session: _lamina.Session) -> dict[str, int]:
    """How the ranks of a job share the work."""
    return {
        "pp": session.group_size("pp"),
        "tp": session.group_size("tp"),
        "rdp": session.group_size("rdp"),
        "sharded_data_parallel_degree": session.group_size("shard"),
        "world": session.size,
    }


def optimizers_of(job: current.Job, optimizer: torch.optim.Optimizer | None) -> list[OptimizerState]:
    """The one that is given, or all of the job's; UsageError for one that is not its."""
    known = [known for known in job.optimizers if optimizer is None or known.optimizer is optimizer]
    if optimizer is not None and not known:
        raise UsageError(
            "the optimizer is not this job's: make it lamina.DistributedOptimizer(optimizer), which knows where its "
            "states are",
            code="checkpoint-no-optimizer",
        )
    return known


def version() -> str:
    """lamina's."""
    try:
        return importlib.metadata.version("lamina")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return ""
