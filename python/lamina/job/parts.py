# SPDX-License-Identifier: Apache-2.0
"""Parts that a job may have, as the packages below theirs see them. Each of these classes does nothing: a job has it
while it has no other. Classes that do something are derived from it, in their own packages."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class CallContext:
    """State of a thread under which modules are called, besides what calls know of anyway: it goes along with calls of
    modules on other ranks, and what they change of it comes back."""

    def calling(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Inside, this thread calls these modules, in this order, on another rank."""
        return nullcontext()

    def told(self, number: Callable[[nn.Module], int]) -> tuple | None:
        """The state that goes along with the call that this thread makes now, of which `marshal` knows all; None where
        there is none.

        Args:
            number: the number of a module of the model.
        """
        return None

    def served(self, told: Any, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside, a call is run under the state that `told` gave on another rank.

        Args:
            modules: those of the model, by number.
        """
        return nullcontext()
