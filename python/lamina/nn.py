# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original: the public name of what is in `layers`."""

from lamina.layers.attention import DistributedAttentionLayer, FlashAttentionLayer
from lamina.layers.basic import DistributedEmbedding, DistributedLayerNorm, DistributedLinear, FusedLayerNorm
from lamina.layers.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)
from lamina.tensor_parallel.correspondence import Row
from lamina.tensor_parallel.registry import DistributedModule

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "Row",
]
