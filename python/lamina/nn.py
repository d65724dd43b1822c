# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original."""

import torch
from torch import nn

__all__ = ["FusedLayerNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, whose parameters may be of another floating-point type than its input, as float32 for half
    inputs. It computes in the type that both fit into; the result has the input's.

    Args:
        normalized_shape, eps, elementwise_affine: torch's.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True
    ):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if weight is None or bias is None or weight.dtype == input.dtype or not input.is_floating_point():
            return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        dtype = torch.promote_types(weight.dtype, input.dtype)
        out = nn.functional.layer_norm(
            input.to(dtype), self.normalized_shape, weight.to(dtype), bias.to(dtype), self.eps
        )
        return out.to(input.dtype)
