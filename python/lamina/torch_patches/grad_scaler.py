# SPDX-License-Identifier: Apache-2.0
"""torch's GradScaler over shards: an infinity in one rank's shard has all ranks leave the step out."""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

_original = GradScaler._unscale_grads_
_worst: list[Callable[[torch.optim.Optimizer, float], float]] = []  # one at most


def install(worst: Callable[[torch.optim.Optimizer, float], float]) -> None:
    """From now on whether an optimizer's gradients are finite is `worst(optimizer, what is found here)`: 0 or 1."""
    _worst[:] = [worst]
    GradScaler._unscale_grads_ = _unscale


def remove() -> None:
    """It is torch's again."""
    _worst.clear()
    GradScaler._unscale_grads_ = _original


def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict:
    found = _original(self, optimizer, *args, **kwargs)
    for worst in _worst:
        here = max((each.item() for each in found.values()), default=0.0)
        everywhere = worst(optimizer, here)
        for each in found.values():
            each.fill_(everywhere)
        found = found or {torch.device(self._device): torch.tensor(everywhere, device=self._device)}
    return found
