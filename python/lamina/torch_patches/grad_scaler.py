# SPDX-License-Identifier: Apache-2.0
"""torch's GradScaler over shards, where an infinity in one rank's shard has all ranks leave the step out, and over
partitions, where it names the one to take."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.amp import GradScaler

from lamina.errors import UsageError

_original = GradScaler._unscale_grads_
_original_check = GradScaler._check_scale_growth_tracker
_worst: list[Callable[[torch.optim.Optimizer, float], float]] = []  # one at most


def install(worst: Callable[[torch.optim.Optimizer, float], float]) -> None:
    """From now on whether an optimizer's gradients are finite is `worst(optimizer, what is found here)`: 0 or 1."""
    _worst[:] = [worst]
    GradScaler._unscale_grads_ = _unscale


def refuse() -> None:
    """From now on a GradScaler of torch's own is an error, on every rank: those that run no body never scale."""
    GradScaler._check_scale_growth_tracker = _refused


def remove() -> None:
    """It is torch's again."""
    _worst.clear()
    GradScaler._unscale_grads_ = _original
    GradScaler._check_scale_growth_tracker = _original_check


def _refused(self: GradScaler, funcname: str) -> NoReturn:
    raise UsageError(
        f"torch.amp.GradScaler.{funcname}() over several partitions: each rank would find infinities in its own part "
        "alone, and the scales of ranks would differ; take lamina.amp.GradScaler, whose arguments are torch's",
        code="optimizer-torch-scaler",
    )


def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict:
    found = _original(self, optimizer, *args, **kwargs)
    for worst in _worst:
        here = max((each.item() for each in found.values()), default=0.0)
        everywhere = worst(optimizer, here)
        for each in found.values():
            each.fill_(everywhere)
        found = found or {torch.device(self._device): torch.tensor(everywhere, device=self._device)}
    return found
