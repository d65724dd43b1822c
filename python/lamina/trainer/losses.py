# SPDX-License-Identifier: Apache-2.0
"""Losses of a model, which may have parts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.model.shards import gathered_parameters


def loss_of(model: nn.Module, outputs: Any, batch: Any) -> Any:
    """The loss of a ComposerModel, which may read parameters of its own; of a sharded one, every rank calls it.

    Args:
        model: with a `loss`.
        outputs: of its forward.
        batch: of which they are.
    """
    with gathered_parameters(model.parameters(recurse=False)):
        return model.loss(outputs, batch)


def parts_of(loss: Any) -> dict[str, torch.Tensor]:
    """The parts of a loss, by name, and their sum "total".

    Errors:
        UsageError: it is none.
    """
    if isinstance(loss, (list, tuple)):
        loss = {f"loss{number}": part for number, part in enumerate(loss)}
    elif not isinstance(loss, Mapping):
        loss = {"total": loss}
    for name, part in loss.items() or [("total", None)]:
        if not isinstance(part, torch.Tensor) or not part.is_floating_point():
            kind = f"a tensor of {part.dtype}" if isinstance(part, torch.Tensor) else f"{part!r:.60}"
            raise UsageError(
                f"the model's loss() gave {kind} as {name!r}: it gives a tensor of floating point numbers, or several, "
                "in a tuple or by name"
            )
    parts = {name: part.mean() if part.dim() else part for name, part in loss.items()}
    return parts if "total" in parts else parts | {"total": sum(parts.values())}


def require_trainable(loss: torch.Tensor) -> None:
    """UsageError where a loss depends on no parameter that trains."""
    if not loss.requires_grad:
        raise UsageError(
            "the model's loss() gave a loss without a gradient: all parameters are frozen (requires_grad=False), or it "
            "was computed under torch.no_grad() or of detached outputs"
        )


def added_up(of_copies: Sequence[dict[str, float]]) -> dict[str, float]:
    """The losses of all copies of the model together, by the names of the first one's."""
    return {name: sum(losses[name] for losses in of_copies) for name in of_copies[0]}
