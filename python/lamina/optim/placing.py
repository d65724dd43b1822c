# SPDX-License-Identifier: Apache-2.0
"""Places of the states of optimizers."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lamina import _lamina
from lamina.util import pytree


def move_states(optimizer: torch.optim.Optimizer, place_of: Callable[[torch.Tensor], torch.device]) -> None:
    """Moves the states of each parameter to a device. Counts of steps stay on the host for those of torch's optimizers
    that read them there."""
    for group in optimizer.param_groups:
        counts_there = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            stays = {} if counts_there or "step" not in state else {"step": state["step"]}
            move = functools.partial(_lamina.upload, device=place_of(parameter))
            state.update(pytree.map_tensors(move, dict(state)) | stays)


class FollowParameters:
    """Has the states of optimizers that were made before the model went to its device go there, too."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A hook before the steps of all optimizers. It looks at each once."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            move_states(optimizer, lambda parameter: parameter.device)
