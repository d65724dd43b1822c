# SPDX-License-Identifier: Apache-2.0
"""Values of a configuration in the engine's words."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Words = tuple[Any, str]


def in_words(value: Any) -> Words:
    """A value as the engine reads it, and as errors show it. Dtypes are their names, modules those of their types; ()
    stands for what no key takes."""
    shown = repr(value)
    if isinstance(value, Mapping):
        return {key: in_words(held) for key, held in value.items()}, shown
    if (modules := modules_of(value)) is not None:
        return [type(each).__name__ for each in modules], shown
    if isinstance(value, torch.dtype):
        return str(value), shown
    return value if value is None or isinstance(value, bool | int | float | str) else (), shown


def modules_of(value: Any) -> list[nn.Module] | None:
    """The modules that a value is, or that a list or a set of them holds; None for others."""
    found = [value] if isinstance(value, nn.Module) else value
    if isinstance(found, list | tuple | set | frozenset | nn.ModuleList) and all(
        isinstance(each, nn.Module) for each in found
    ):
        return list(found)
    return None
