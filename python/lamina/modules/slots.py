# SPDX-License-Identifier: Apache-2.0
"""Where the modules of a model keep their parameters and buffers, and what is there when a step begins."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lamina import _lamina


@dataclass(frozen=True)
class Slot:
    """A place for a parameter or buffer.

    Attributes:
        name: of what is there, in the model.
        held: the dictionary of the module that has it, under `key`.
    """

    name: str
    held: dict[str, torch.Tensor | None]
    key: str


class Slots:
    """The places of all parameters and buffers of a model, in an order that is the same on every rank.

    Args:
        root: the model; what comes into it later has no place.
    """

    def __init__(self, root: nn.Module):
        self._slots = [
            Slot(f"{path}.{name}" if path else name, held, name)
            for kind in ("_parameters", "_buffers")
            for path, module in root.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # it cannot be given others
            for held in (getattr(module, kind),)
            for name in held
        ]
        self._places = [(slot.held, slot.key) for slot in self._slots]
        self._tensors: list[torch.Tensor | None] = []

    def watch(self, session: _lamina.Session) -> bool:
        """Before a step: tells the engine of the parameters whose requires_grad a body may set. Returns whether there
        are other tensors than the last time."""
        tensors = [held.get(key) for held, key in self._places]
        if len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors)):
            return False
        self._tensors = tensors
        # Forwards take their buffers for sums that require gradients, and nobody else sees that.
        parameters = [tensor if isinstance(tensor, nn.Parameter) else None for tensor in tensors]
        session.watch_flags([slot.name for slot in self._slots], parameters)
        return True

    def of(self, modules: Iterable[nn.Module]) -> list[tuple[Slot, torch.Tensor | None]]:
        """The places in these modules, and what was there when the step began."""
        inside = {id(held) for module in modules for held in (module._parameters, module._buffers)}
        both = zip(self._slots, self._tensors, strict=True)
        return [(slot, tensor) for slot, tensor in both if id(slot.held) in inside]
