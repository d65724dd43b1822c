# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original: the public name of what is in `layers`."""

from lamina.layers.basic import DistributedEmbedding, DistributedLayerNorm, DistributedLinear, FusedLayerNorm
from lamina.tensor_parallel.correspondence import Row
from lamina.tensor_parallel.registry import DistributedModule

__all__ = [
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "FusedLayerNorm",
    "Row",
]
