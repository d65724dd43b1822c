# SPDX-License-Identifier: Apache-2.0
"""Communication hooks: what a user puts in the place of averaging gradients over the replicas."""

from collections.abc import Callable
from typing import Any

import torch

CommHook = Callable[[Any, "GradBucket"], torch.futures.Future]


class GradBucket:
    """Gradients that travel together, as hooks written for torch.distributed.GradBucket use them."""

    def __init__(self, index: int, last: bool, buffer: torch.Tensor, parameters: list[torch.Tensor]):
        self._index = index
        self._last = last
        self._buffer = buffer
        self._parameters = parameters

    def index(self) -> int:
        """Its number in this reduction."""
        return self._index

    def is_last(self) -> bool:
        """True where no other follows in this reduction."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Its gradients, in one dimension."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Puts another tensor in the place of `buffer()`."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each of `parameters()`: views of the buffer."""
        pieces = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [piece.view(like.shape) for piece, like in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return self._parameters
