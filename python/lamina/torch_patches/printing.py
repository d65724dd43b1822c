# SPDX-License-Identifier: Apache-2.0
"""How a tensor prints whose value another rank has, or that is sharded, or a slice."""

from typing import Any

import torch

from lamina import _lamina

_TORCHS_STR = torch._tensor_str._str


def install() -> None:
    """From now on a tensor without a value says where that is, and a slice what it is one of. All others as before."""
    torch._tensor_str._str = _str


def _str(tensor: torch.Tensor, **options: Any) -> str:
    if why := _lamina.why_guarded(tensor):
        with _lamina.Unguarded():
            return f"{_TORCHS_STR(tensor, **options)}  # {why}"
    where = "sharded, and its value is away" if _lamina.is_away(tensor) else _lamina.where_released(tensor)
    if not where:
        return _TORCHS_STR(tensor, **options)
    grad = ", requires_grad=True" if tensor.requires_grad else ""
    return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}{grad}; {where})"
