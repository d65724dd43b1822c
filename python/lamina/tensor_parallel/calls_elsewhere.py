# SPDX-License-Identifier: Apache-2.0
"""Calls of modules on other ranks, below a module that computes with parts: see [Note: dropout of parts]."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from lamina.job.parts import CallContext
from lamina.tensor_parallel import dropout, layers

# A module around sliced layers, by its number, and the state of its call.
Told = tuple[int, tuple[tuple[int, ...], ...]]


class DropoutContext(CallContext):
    """The dropout of parts, which goes along with calls of modules on other ranks."""

    def __init__(self):
        self._left = threading.local()  # `mode`: the one that this thread has left for a call

    @contextmanager
    def calling(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """As `CallContext.calling`."""
        with dropout.left() as mode:
            self._left.mode = mode
            yield
        if mode is not None:
            layers.passed_by(mode, modules)

    def told(self, number: Callable[[nn.Module], int]) -> Told | None:
        """As `CallContext.told`."""
        mode = self._left.mode
        return None if mode is None else (number(mode.module), layers.travelling(mode))

    def served(self, told: Told | None, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """As `CallContext.served`."""
        if told is None:
            return super().served(told, modules)
        number, state = told
        return layers.arrived(modules[number], state)
