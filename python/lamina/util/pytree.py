# SPDX-License-Identifier: Apache-2.0
"""Nested containers: what stands in them, and the same container around other values."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """(label, child) of each value in a container, None for what is no container.

    Containers are lists, tuples, named tuples, dictionaries, sets and instances of dataclasses, and of classes derived
    from these.
    """
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return ((f"[{index}]", child) for index, child in enumerate(value))
    if isinstance(value, dict):
        return ((f"[{key!r}]", child) for key, child in value.items())
    if isinstance(value, (set, frozenset)):
        return (("{...}", child) for child in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def rebuild(value: Any, parts: list[Any]) -> Any:
    """A container like `value`, with `parts` in the place of its children."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if kind in (list, set, frozenset):
        return kind(parts)
    if isinstance(value, dict):
        items = dict(zip(value, parts, strict=True))
        if kind is dict:
            return items
        if dataclasses.is_dataclass(value):  # its fields are its items
            return kind(**items)
        other = copy.copy(value)
        other.update(items)
        return other
    if isinstance(value, list):
        other = copy.copy(value)
        other[:] = parts
        return other
    if isinstance(value, (set, frozenset)):
        return kind(parts)
    other = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(other, field.name, part)
    return other


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function(part)` in the place of every part for which that is not None; what holds none of these
    stays the same object."""
    if (found := function(value)) is not None:
        return found
    if (held := children(value)) is None:
        return value
    before = [child for _, child in held]
    after = [map_values(function, child) for child in before]
    return value if all(a is b for a, b in zip(before, after, strict=True)) else rebuild(value, after)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with `function(tensor)` in the place of every tensor; what holds no tensor stays the same object."""
    return map_values(lambda part: function(part) if isinstance(part, torch.Tensor) else None, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in their order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found
