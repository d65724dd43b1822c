# SPDX-License-Identifier: Apache-2.0
"""The modules of a model, as all that watches its state knows them."""

from collections.abc import Iterable

from torch import nn

Key = tuple[int, str]  # an attribute: id(module) and its name


class Modules:
    """Modules that microbatches share.

    Args:
        named: the model's, with their names, alike on every rank. The caller keeps them alive.

    Attributes:
        names, all: in order.
        places: where each stands among them, by id(module).
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]] = ()):
        named = list(named)
        self.names = [name for name, _ in named]
        self.all = [module for _, module in named]
        self.places = {id(module): place for place, module in enumerate(self.all)}

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self.places

    def path(self, module: nn.Module, name: str) -> str:
        """An attribute of one of them, as messages have it."""
        path = self.names[self.places[id(module)]]
        return f"{path}.{name}" if path else f"attribute {name!r} of the model"
