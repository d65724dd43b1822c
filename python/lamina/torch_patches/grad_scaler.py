# SPDX-License-Identifier: Apache-2.0
"""torch's GradScaler where something stands for parameters in an optimizer's groups: gradients are found where they
are, and an infinity in one rank's shard has all ranks leave the step out. Over partitions it names the one to take."""

import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.amp import GradScaler

from lamina.errors import UsageError

_original = GradScaler._unscale_grads_
_original_check = GradScaler._check_scale_growth_tracker
Worst = Callable[[torch.optim.Optimizer, float], float]
Holders = Callable[[torch.optim.Optimizer], list[torch.Tensor] | None]
Complete = Callable[[torch.optim.Optimizer], None]
_installed: list[tuple[Worst, Holders, Complete]] = []  # one at most


def install(worst: Worst, holders: Holders, complete: Complete) -> None:
    """From now on whether an optimizer's gradients are finite is `worst(optimizer, what is found here)`: 0 or 1.

    Args:
        complete: averages, before, what there is of its gradients that no reduction has had.
        holders: lists what has the gradients of an optimizer; None: its own parameters.
    """
    _installed[:] = [(worst, holders, complete)]
    GradScaler._unscale_grads_ = _unscale


def refuse() -> None:
    """From now on a GradScaler of torch's own is an error, on every rank: those that run no body never scale."""
    GradScaler._check_scale_growth_tracker = _refused


def remove() -> None:
    """It is torch's again."""
    _installed.clear()
    GradScaler._unscale_grads_ = _original
    GradScaler._check_scale_growth_tracker = _original_check


def _refused(self: GradScaler, funcname: str) -> NoReturn:
    raise UsageError(
        f"torch.amp.GradScaler.{funcname}() over several partitions: each rank would find infinities in its own part "
        "alone, and the scales of ranks would differ; take lamina.amp.GradScaler, whose arguments are torch's",
        code="optimizer-torch-scaler",
    )


def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict:
    for worst, holders, complete in _installed:
        complete(optimizer)
        held = holders(optimizer)
        of = optimizer if held is None else types.SimpleNamespace(param_groups=[{"params": held}])
        found = _original(self, of, *args, **kwargs)
        here = max((each.item() for each in found.values()), default=0.0)
        everywhere = worst(optimizer, here)
        for each in found.values():
            each.fill_(everywhere)
        return found or {torch.device(self._device): torch.tensor(everywhere, device=self._device)}
    return _original(self, optimizer, *args, **kwargs)
