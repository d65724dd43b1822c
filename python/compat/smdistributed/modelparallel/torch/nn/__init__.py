# SPDX-License-Identifier: Apache-2.0
from lamina.nn import DistributedEmbedding as DistributedEmbedding
from lamina.nn import DistributedLayerNorm as DistributedLayerNorm
from lamina.nn import DistributedLinear as DistributedLinear
from lamina.nn import DistributedModule as DistributedModule
from lamina.nn import FusedLayerNorm as FusedLayerNorm
from smdistributed.modelparallel.torch.nn import huggingface as huggingface


def __getattr__(name: str) -> object:
    raise AttributeError(f"smdistributed.modelparallel.torch.nn.{name} is not available yet")
