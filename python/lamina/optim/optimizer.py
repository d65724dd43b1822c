# SPDX-License-Identifier: Apache-2.0
"""Ordinary optimizers of a distributed model."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState
from lamina.optim.shards import why_not_parts
from lamina.optim.sliced import require_fits
from lamina.util.checks import require_booleans, require_positive

# Names in dynamic_loss_args, and types of their values.
_DYNAMIC = {
    "init_scale": (float, int),
    "scale_factor": (float, int),
    "scale_window": (int,),
    "min_scale": (float, int),
    "delayed_shift": (int,),
    "consecutive_hysteresis": (bool,),
}


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Makes an optimizer of the whole model one of this rank's part of it.

    When the model is partitioned, parameters that other ranks own leave its parameter groups. The groups stay the same
    objects, and may end up empty.

    Args:
        optimizer: any torch optimizer that updates each parameter by itself, made before or after the DistributedModel.
        static_loss_scale: what `model.backward` multiplies losses by, and `step` divides gradients by; None is 1. A job
            has one loss scale.
        dynamic_loss_scale: whether it moves instead: an overflow of gradients makes it smaller, a window of steps
            without one larger.
        dynamic_loss_args: how: `init_scale` (2**32), `scale_factor` (2), `scale_window` (1000 steps), `min_scale` (1),
            `delayed_shift` (1: so many overflows make it smaller), `consecutive_hysteresis` (False: whether one step
            without makes them count anew).

    With the configuration `fp16` or `bf16` the groups hold masters, float32 copies of this rank's parameters, and with
    `shard_optimizer_state` this rank's part of each, from when the model is partitioned. A step in which gradients
    overflow on any rank is left out on all, and `optimizer.overflow` says so.

    Returns:
        The same optimizer, with the methods of `optimizer_state.OptimizerState`: `state_dict` is the whole optimizer's,
        `local_state_dict` that of this rank's part, and `load_state_dict` takes either.

    Errors:
        UsageError: not an optimizer, one that measures all parameters at once (LBFGS) over several partitions, or takes
            sparse gradients alone (SparseAdam) over copies. A loss scale that makes no sense or is not the job's, or no
            `init`.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer, as {optimizer.__name__}(model.parameters()), not its class; the "
            "one that takes a class and remote parameters is lamina.optim.DistributedOptimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    job = current.job()
    if job.pipelined and isinstance(optimizer, torch.optim.LBFGS):
        raise refusal("lbfgs-in-parts")
    scale = _loss_scale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
    _require_known(optimizer, job)
    state = job.state_of(optimizer)
    if state is None:
        _require_free(optimizer)
        state = OptimizerState(optimizer, _shared(job, scale))
        state.install()
        job.optimizers.append(state)
    elif scale.is_on:
        _shared(job, scale)
    if job.partitioned_model is not None:
        state.trim(job.partitioned_model)
    return optimizer


def _require_free(optimizer: torch.optim.Optimizer) -> None:
    """UsageError for one of a job that has ended: its groups have what the other job's model was cut into."""
    if getattr(optimizer, "optimizer", None) is optimizer:
        raise UsageError(
            "this optimizer is a DistributedOptimizer of an earlier job: make a new one, and load the state dict of "
            "this one, taken before the job was shut down",
            code="step-after-shutdown",
        )


def _require_known(optimizer: torch.optim.Optimizer, job: current.Job) -> None:
    """UsageError for an optimizer that needs more of a parameter than a rank has."""
    config, kind = job.session.config, type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam) and config.ddp and job.session.group_size("replicas") > 1:
        raise UsageError(
            f"{kind} with ddp: it takes sparse gradients alone, and averaged over copies of the model these are dense: "
            "take Adam, or make the embedding without sparse=True",
            code="optimizer-sparse",
        )
    require_fits(optimizer, job)
    if not (why := why_not_parts(optimizer)):
        return
    if config.sharded_data_parallel_degree > 1:
        raise refusal("sharded-optimizer", kind, why)
    if job.session.updates_divided_over is not None:
        raise refusal("divided-optimizer", kind, why)


def _loss_scale(static: float | None, dynamic: bool, args: Mapping[str, Any] | None) -> _lamina.LossScale:
    static = 1.0 if static is None else static
    require_positive(static_loss_scale=static)
    require_booleans(dynamic_loss_scale=dynamic)
    if not isinstance(args, Mapping | None):
        raise UsageError(f"dynamic_loss_args is a dictionary, not {args!r}")
    args = dict(args or {})
    if unknown := [name for name in args if name not in _DYNAMIC]:
        raise UsageError(f"dynamic_loss_args has {', '.join(map(str, unknown))}; its names are {', '.join(_DYNAMIC)}")
    for name, value in args.items():
        if type(value) not in _DYNAMIC[name]:
            raise UsageError(f"dynamic_loss_args[{name!r}] is {_DYNAMIC[name][0].__name__}, not {value!r}")
    # Its values are checked whether it is taken or not.
    try:
        moving = _lamina.LossScale(**{name: _DYNAMIC[name][0](value) for name, value in args.items()})
        return moving if dynamic else _lamina.LossScale(float(static))
    except (OverflowError, TypeError):  # what a number of C++ does not hold
        raise UsageError("static_loss_scale or dynamic_loss_args has a number that is too large") from None


def _shared(job: current.Job, scale: _lamina.LossScale) -> _lamina.LossScale:
    """The job's loss scale, which is this one."""
    if not job.optimizers:
        job.loss_scale = scale
        if job.has_model:
            job.model.backwards.scale_by(scale)
            job.gradients.see_to_norms()
    elif job.loss_scale.is_dynamic or scale.is_dynamic or job.loss_scale.value != scale.value:
        raise refusal("two-loss-scales")
    return job.loss_scale
