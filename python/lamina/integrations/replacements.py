# SPDX-License-Identifier: Apache-2.0
"""Modules of lamina's own in the places of a model's, and what that means for the names of its weights."""

from collections.abc import Callable, Mapping
from typing import Any

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ModuleManager:
    """Knows which modules were replaced.

    Attributes:
        translate_functions: pairs of functions of a state dict, to Hugging Face's names and back: one for each kind of
            model that has replaced modules. Empty where nothing is replaced, as names are Hugging Face's then.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Translate, Translate]] = []


module_manager = ModuleManager()
