# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a device."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from lamina import _lamina
from lamina.job import ranks
from lamina.util import pytree


def moved(value: Any, device: torch.device) -> Any:
    """The value with all tensors in it there, for which the host does not wait; as it is where they are there already.
    Objects that have a `to` of their own, such as transformers' batches, move themselves."""
    return pytree.map_values(functools.partial(_moved_whole, device=device), value)


def on_rank(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches on the rank's device; on the host they are as they were."""
    device = ranks.device()
    return batches if device.type == "cpu" else map(functools.partial(moved, device=device), batches)


def _moved_whole(value: Any, device: torch.device) -> Any:
    """The value there, if it moves as one; else None."""
    if isinstance(value, torch.Tensor):
        return _lamina.upload(value, device)
    own = getattr(value, "to", None)
    return own(device) if callable(own) and not isinstance(value, (type, torch.nn.Module)) else None
