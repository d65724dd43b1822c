# SPDX-License-Identifier: Apache-2.0
"""The way of one call through a model: what each module itself does between calls of others, in this order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lamina.util import pytree


@dataclass
class Stretch:
    """The work of a module from the beginning of a call of it, or the end of one that it made, to the next.

    Attributes:
        at: its place among those of all modules.
        forward_us, backward_us: times.
        value_bytes: what it hands on: arguments of the module that is called next, or what it returns.
        works: whether it runs an operation, be it a view: then it needs the value.
    """

    at: int
    forward_us: float = 0.0
    backward_us: float = 0.0
    value_bytes: int = 0
    works: bool = False


class Way:
    """Fills in the stretches of each node. The first of a call is there even if the module does nothing in it."""

    def __init__(self, stretches: list[list[Stretch]]):
        self._stretches = stretches
        self._count = 0
        self._open: Stretch | None = None

    def enter(self, node: int, arguments: Any) -> None:
        """A call of a node begins."""
        self._hand_on(arguments)
        self._begin(node)

    def leave(self, output: Any) -> None:
        """The innermost call ends."""
        self._hand_on(output)

    def work(self, node: int, forward_us: float, backward_us: float) -> None:
        """The innermost node runs an operation."""
        stretch = self._open or self._begin(node)
        stretch.forward_us += forward_us
        stretch.backward_us += backward_us
        stretch.works = True

    def _begin(self, node: int) -> Stretch:
        self._open = Stretch(self._count)
        self._count += 1
        self._stretches[node].append(self._open)
        return self._open

    def _hand_on(self, values: Any) -> None:
        if self._open is not None:
            self._open.value_bytes = size_bytes(pytree.tensors(values))
        self._open = None


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
