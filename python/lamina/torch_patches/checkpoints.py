# SPDX-License-Identifier: Apache-2.0
"""Functions that torch's checkpoints compute again, in a backward."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils import checkpoint

from lamina.torch_version import CHECKPOINT
from lamina.util.settings import replace


def install(recomputing: Callable[[Callable], Callable], undo: ExitStack) -> None:
    """Until `undo` is closed, a function that a checkpoint begins to compute is `recomputing(function)` to it."""
    reentrant, other = checkpoint.CheckpointFunction.forward, getattr(checkpoint, CHECKPOINT)

    def forward(ctx: Any, function: Callable, *args: Any) -> Any:
        return reentrant(ctx, recomputing(function), *args)

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return other(recomputing(function), *args, **kwargs)

    replace(undo, checkpoint.CheckpointFunction, "forward", staticmethod(forward))
    replace(undo, checkpoint, CHECKPOINT, generator)
