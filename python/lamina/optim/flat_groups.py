# SPDX-License-Identifier: Apache-2.0
"""The elements of a group of an optimizer as one tensor, as scripts for sharded optimizers have it."""

from collections.abc import Sequence

import torch

from lamina import _lamina
from lamina.job import current


def lie_together(tensors: list[torch.Tensor]) -> None:
    """Gives tensors of one dtype memory in one piece, one after the other. Each stays the same object."""
    whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, own in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = own.view(tensor.shape)


class FlatGroups(Sequence):
    """Per group a tensor of one dimension, in float32 or more, of all that this rank updates of it. It is the group's
    own memory where that lies together, as masters' does, else a copy that is made when it is asked for. Of each
    parameter it has the same part as `ds_tensor`, also of one that stays whole on all ranks.

    Args:
        optimizer: whose groups they are.
        parameters: knows what stands in the groups for them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: _lamina.LocalParameters):
        self._groups = optimizer.param_groups
        self._parameters = parameters

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group: int) -> torch.Tensor:
        job = current.job_if_any()
        if job is not None and any(known.parameters is self._parameters for known in job.optimizers):
            self._parameters.follow()  # a job that has ended has given its shards back
        with _lamina.Unguarded():  # of slices these are slices, too
            return self._together(group)

    def _together(self, group: int) -> torch.Tensor:
        parts = [self._part(local) for local in self._groups[group]["params"]]
        if not parts:
            return torch.zeros(0)
        at, first = 0, parts[0]
        for part in parts:
            together = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not (together and part.is_contiguous() and part.storage_offset() == first.storage_offset() + at):
                return _at_least_float32(torch.cat([part.reshape(-1) for part in parts]))
            at += part.numel()
        return _at_least_float32(first.as_strided((at,), (1,), first.storage_offset()))

    def _part(self, local: torch.Tensor) -> torch.Tensor:
        own, source = local.detach(), self._parameters.source(local)
        if not hasattr(source, "ds_tensor"):  # a shard, or nothing is sharded
            return own
        if source is local and source.ds_tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
            return source.ds_tensor.detach()
        begin, end, size = current.session().share_of(source.ds_numel)
        part = own.reshape(-1)[begin:end]
        return torch.nn.functional.pad(part, (0, size - part.numel()))


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
