# SPDX-License-Identifier: Apache-2.0
"""Values that a training has measured. On a device they stay tensors until somebody reads them: that is a wait for all
that was computed before."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from lamina.pipeline.output import StepOutput


def times(value: torch.Tensor, factor: float) -> float | torch.Tensor:
    """A number times a factor, in double precision."""
    return (value.item() if _is_here(value) else value.detach().double()) * factor


def added(values: list[float] | StepOutput[torch.Tensor]) -> float | torch.Tensor:
    """The sum over microbatches of what a step function returned."""
    return sum(values if isinstance(values, list) else values.outputs)


def are_on_device(values: Collection[float | torch.Tensor]) -> bool:
    """True where there are some, and all are tensors of a device."""
    return len(values) > 0 and all(isinstance(each, torch.Tensor) and not _is_here(each) for each in values)


def unread(value: Any) -> Any:
    """The value with tensors of the host as plain numbers, or lists of several; it may be a dictionary."""
    return _each(value, lambda tensor: tensor.tolist() if _is_here(tensor) else tensor.detach())


def plain(value: Any) -> Any:
    """As `unread`, with what is on a device, too."""
    return _each(value, torch.Tensor.tolist)


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _each(value: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _each(item, read) for name, item in value.items()}
    return read(value) if isinstance(value, torch.Tensor) else value
