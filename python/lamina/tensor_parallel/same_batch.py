# SPDX-License-Identifier: Apache-2.0
"""The one batch of the ranks of a TP_GROUP, with `prescaled_batch`: compared where a model is first called."""

from typing import Any

import torch

from lamina import _lamina
from lamina.errors import DesyncError
from lamina.util import pytree

_BYTES = 1 << 20  # so many are looked at at a time
_FACTOR = 0x9E3779B97F4A7C1  # odd


@torch.no_grad()
def require_same_batch(given: Any, session: _lamina.Session) -> None:
    """Compares tensors that are given to a model; collective over TP_GROUP.

    Errors:
        DesyncError: another rank has been given other ones.
    """
    tensors = [each for each in pytree.tensors(given) if each.layout is torch.strided and not each.is_meta]
    device = tensors[0].device if tensors else torch.device("cpu")
    own = torch.stack([_checksum(tensors, device), torch.tensor(len(tensors), device=device)])
    all = torch.ops.lamina.tp_gather(own, 0, [2] * session.group_size("tp"), session.team()).view(-1, 2).tolist()
    if other := [index for index, its in enumerate(all) if its != all[0]]:
        ranks = session.group_members("tp")
        raise DesyncError(
            f"ranks {ranks[0]} and {ranks[other[0]]} of a TP_GROUP have called the model with other values, and with "
            "prescaled_batch: true they read one batch: read data by lamina.rdp_rank(), or take prescaled_batch: false",
            code="tp-other-batch",
        )


def _checksum(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A number that differs, almost surely, where a bit does."""
    sum = torch.zeros((), dtype=torch.long, device=device)
    for tensor in tensors:
        sum = sum * _FACTOR + tensor.dim()
        for extent in tensor.shape:
            sum = sum * _FACTOR + extent
        for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_BYTES):
            places = torch.arange(1, part.numel() + 1, device=part.device)
            mixed = (part.long() + 1) * places * _FACTOR
            sum = sum * _FACTOR + (mixed ^ (mixed >> 29)).sum().to(device)
    return sum
