# SPDX-License-Identifier: Apache-2.0
"""Calls of a model, as the ranks of a TP_GROUP compare them: see [Note: given alike] in
lamina/tensor_parallel/team.h."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.torch_patches import compiled
from lamina.util import pytree


class Calls:
    """The calls of one model, all ranks of whose TP_GROUP have one batch."""

    def __init__(self, root: nn.Module, session: _lamina.Session):
        self._session = session
        self._modules = list(root.modules())
        self._parameters = list(root.parameters())
        self._is_first = True

    @compiled.left_alone
    def note(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """A call begins."""
        tensors = [tensor for each in (*args, *kwargs.values()) for tensor in _given(each)]
        training = bytes([bool(module.training) for module in self._modules])
        trained = bytes([parameter.requires_grad for parameter in self._parameters])
        self._session.note_call(tensors, training, trained, on_devices=self._is_first)
        self._is_first = False


def _given(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, without those that the script has computed with gradients. Containers in containers, and
    lists of a call without gradients, may be keys and values that the model gave back, of which each rank has its own.
    """
    shallow = (dict, list, tuple) if torch.is_grad_enabled() else dict
    parts = [child for _, child in pytree.children(value) or ()] if isinstance(value, shallow) else [value]
    yield from (each for each in parts if isinstance(each, torch.Tensor) and not each.requires_grad)
