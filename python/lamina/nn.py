# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original."""

import torch
from torch import nn

__all__ = ["FusedLayerNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which computes in the type of its parameters where the input has another one: half inputs may
    have float32 parameters. The result has the input's type.

    Args:
        normalized_shape, eps, elementwise_affine: torch's.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True
    ):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is None or self.weight.dtype == input.dtype:
            return super().forward(input)
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)
