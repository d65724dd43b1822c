# SPDX-License-Identifier: Apache-2.0
"""Modules of lamina's own in the places of a model's, and what that means for the names of its weights."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ModuleManager:
    """Knows which modules were replaced.

    Attributes:
        translate_functions: pairs of functions of a state dict, to the names that the replaced modules had and back:
            one for each of them in the current model. Empty where nothing is replaced.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Translate, Translate]] = []

    def in_own_names(self, state: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
        """A whole state with the names that the model has here; as it is where it has them.

        Args:
            own: those names.
        """
        for _, from_hugging_face in self.translate_functions:
            if any(name not in state for name in own):
                state = from_hugging_face(state)
        return state


module_manager = ModuleManager()
