# SPDX-License-Identifier: Apache-2.0
"""The running statistics of BatchNorm, which the engine keeps as the plain loop does: see [Note: running statistics] in
lamina/runtime/running_statistics.h."""

import itertools

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lamina.model.partitioned import PartitionedModel

Row = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, float | None]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """The BatchNorms of a model, which is cut.

    Args:
        root: the model.
        model: who owns what of it.
    """

    def __init__(self, root: nn.Module, model: PartitionedModel):
        self._root = root
        named = [(name, module) for name, module in root.named_modules() if isinstance(module, _BatchNorm)]
        self._all = [module for _, module in named]
        self._own = [(name, module) for name, module in named if model.owns(name)]

    def rows(self) -> list[Row]:
        """(name, running mean, running variance, count, momentum) of each that this rank owns and that has them."""
        return [(name, *_tensors(module), module.momentum) for name, module in self._own if _tensors(module)]

    def are_all_buffers(self) -> bool:
        """True where the model has no other buffers, on whichever rank."""
        known = set(map(id, itertools.chain.from_iterable(map(_tensors, self._all))))
        return all(id(buffer) in known for buffer in self._root.buffers())


def _tensors(module: _BatchNorm) -> list[torch.Tensor]:
    """Its running statistics, if it has all of them."""
    tensors = [module._buffers.get(name) for name in _BUFFERS]
    return [] if any(tensor is None for tensor in tensors) else tensors
