# SPDX-License-Identifier: Apache-2.0
"""The order of calls that set an attribute and read it, on a rank that other ranks call."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lamina.errors import UsageError
from lamina.shared_state.modules import Key, Modules


@dataclass
class _Setter:
    name: str  # of the module that was called
    turn: tuple[int, int]  # step and microbatch
    again: bool = False  # it was set in another turn before


class _Served(threading.local):
    """The name of the module that this thread runs for another rank."""

    name: str | None = None


class Setters:
    """The call of another rank that has set an attribute last.

    Args:
        modules: the model's.
        waited: names of modules whose callers wait for them, so that what is called next finds what they set.

    Attributes:
        served: what this thread runs for another rank, which whoever runs it says.
    """

    def __init__(self, modules: Modules, waited: Sequence[str]):
        self._modules, self._waited = modules, set(waited)
        self._setters: dict[Key, _Setter] = {}
        self.served = _Served()
        self._steps = 0

    def note(self, key: Key, microbatch: int) -> None:
        """A microbatch has set an attribute in this thread."""
        if (name := self.served.name) is not None:
            turn, before = (self._steps, microbatch), self._setters.get(key)
            again = before is not None and (before.again or before.turn != turn)
            self._setters[key] = _Setter(name, turn, again)

    def require_order(self, module: nn.Module, name: str, microbatch: int) -> None:
        """Raises UsageError where what one call of another rank sets, in each microbatch anew, is read in a call of
        another module: their order is kept where the caller waits for the first."""
        if (setter := self._setters.get((id(module), name))) is None:
            return
        reader = self.served.name
        crosses = setter.turn == (self._steps, microbatch) and reader not in (None, setter.name)
        if crosses and setter.again and setter.name not in self._waited:
            raise UsageError(
                f"{self._modules.path(module, name)} is set in a call of {setter.name} and read in one of {reader}, by "
                f"a rank that does not wait in between: lamina.set_dynamic() of {setter.name}, before the first step, "
                "has it wait",
                code="step-attribute-order",
            )

    def end_step(self) -> None:
        """Attributes that are set from now on are set in another turn."""
        self._steps += 1
