# SPDX-License-Identifier: Apache-2.0
"""Optimizers over slices of parameters, which the ranks of a TP_GROUP have: see [Note: needs] in
lamina/fused/declaration.h."""

from typing import Any

from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.optim.registry import needs_of
from lamina.optim.shards import why_not_parts
from lamina.tensor_parallel import layers, replacing

_WHY = {
    "norms": "it measures each parameter, of which a slice is here: make it a lamina.DistributedOptimizer",
    "whole": "it looks at all of a parameter, of which a slice is here: make it a lamina.DistributedOptimizer",
}


def see_to_steps(job: current.Job) -> None:
    """From now on optimizers that cannot update slices, or have parameters that are gone, are refused before they
    update any."""
    _lamina.set_updating(False)  # which a step that failed has left on
    job.on_end.callback(register_optimizer_step_pre_hook(_before_step).remove)
    job.on_end.callback(register_optimizer_step_post_hook(lambda *_: _lamina.set_updating(False)).remove)


def require_fits(optimizer: optim.Optimizer, job: current.Job, knows_others: bool = True) -> None:
    """UsageError for an optimizer that would update slices as if they were parameters, or parameters that are gone.

    Args:
        knows_others: whether the other ranks' slices are there for its updates, as a DistributedOptimizer has it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (module := replacing.where_replaced(parameter)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} has parameters that {module} had before it became another class, when "
                    "the model was wrapped: make the optimizer after that, of model.parameters()",
                    code="tp-optimizer",
                )
    why = why_not_parts(optimizer) or _WHY.get(needs_of(type(optimizer)), "")
    is_fine = not why or (knows_others and needs_of(type(optimizer)) in _WHY)
    if is_fine:
        return
    slices = layers.slicings(job.model.module)
    known = job.state_of(optimizer)
    parameter_of = (lambda local: local) if known is None else known.parameter_of
    if any(id(parameter_of(member)) in slices for group in optimizer.param_groups for member in group["params"]):
        raise refusal("sliced-optimizer", type(optimizer).__name__, why)


def _before_step(optimizer: optim.Optimizer, *_: Any) -> None:
    job = current.job_if_any()
    if job is not None:
        require_fits(optimizer, job, job.state_of(optimizer) is not None)
        _lamina.set_updating(True)
