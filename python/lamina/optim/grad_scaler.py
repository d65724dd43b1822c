# SPDX-License-Identifier: Apache-2.0
"""torch's GradScaler for models that are spread over ranks."""

import inspect
import types
import weakref
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.job.ranks import likely_device
from lamina.optim.options import is_joining
from lamina.torch_patches import grad_scaler

_OPTIONS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


class GradScaler(torch.amp.GradScaler):
    """As torch's, alike on all ranks of the model and its copies: also on those that never scale a loss, because step
    functions run their bodies elsewhere. An infinity that one rank finds has all leave the step out; `unscale_` and
    `step` are collective over them.

    Args:
        device: of the scale; as torch's it may be the first argument. Without one it is the rank's, and before
            `lamina.init` the one that a job gets by default.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: torch's.

    Errors:
        UsageError: of its methods, with the configuration `fp16` or `bf16`, where DistributedOptimizer scales.
    """

    def __init__(self, *args: Any, device: str | torch.device | None = None, **kwargs: Any):
        if args and isinstance(args[0], str | torch.device):
            device, *args = args
        if device is None:
            device = likely_device().type
        super().__init__(str(device), **dict(zip(_OPTIONS, args, strict=False)), **kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's."""
        self._forget_before()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        self._forget_before()
        if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _forget_before(self) -> None:
        """Gradients of a job that goes on without a lost rank are other ones."""
        job = current.job_if_any()
        if job is not None and self not in (known := job.own(_Scalers).known):
            known.add(self)
            grad_scaler.forget(self)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self._scale, self._growth_tracker

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict:
        held = holders(optimizer)
        if held is None:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        job = current.job()
        job.gradients.complete("GradScaler.unscale_()")
        found = super()._unscale_grads_(types.SimpleNamespace(param_groups=[{"params": held}]), *args, **kwargs)
        everywhere = job.session.largest("one_copy" if is_joining(job) else "world", grad_scaler.largest(found))
        return grad_scaler.on_host(self, everywhere)


class _Scalers:
    """Scalers that have looked at gradients of a job."""

    def __init__(self):
        self.known: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def holders(optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
    """Lists what has the gradients of a DistributedOptimizer; None for another optimizer.

    Errors:
        UsageError: with the configuration `fp16` or `bf16`.
    """
    job = current.job_if_any()
    known = None if job is None else job.state_of(optimizer)
    if known is None:
        return None
    if job.session.updates_masters:
        raise UsageError(
            f"GradScaler with {'fp16' if job.session.config.fp16 else 'bf16'}: DistributedOptimizer(optimizer, "
            "dynamic_loss_scale=True) scales losses there; leave the GradScaler out",
            code="optimizer-loss-scale",
        )
    return known.holders()


_TORCHS = inspect.signature(torch.amp.GradScaler).parameters
GradScaler.__signature__ = inspect.Signature([_TORCHS[name] for name in _OPTIONS])
