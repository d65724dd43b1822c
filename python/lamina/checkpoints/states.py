# SPDX-License-Identifier: Apache-2.0
"""States of optimizers as tensors with names, which is all that a checkpoint has of them."""

from collections.abc import Iterator
from typing import Any

import torch

from lamina.errors import UsageError

_NUMBER = "#"  # ends the name of a state that is no tensor, but a number, a boolean or None
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def to_tensors(name: str, state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) of each value of a parameter's state; UsageError for one that is no tensor and no number."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield key, value
        elif value is None:
            yield key + _NUMBER, torch.empty(0)
        elif type(value) in _DTYPES:
            yield key + _NUMBER, torch.tensor(value, dtype=_DTYPES[type(value)])
        else:
            raise UsageError(
                f"the state {key!r} that the optimizer has of {name} is of type {type(value).__name__}: a checkpoint "
                "has tensors and numbers; save the optimizer's state_dict() with lamina.save()",
                code="checkpoint-cannot-save",
            )


def from_tensor(key: str, value: torch.Tensor) -> tuple[str, Any]:
    """The way back."""
    if not key.endswith(_NUMBER):
        return key, value
    return key[: -len(_NUMBER)], value.item() if value.numel() else None
