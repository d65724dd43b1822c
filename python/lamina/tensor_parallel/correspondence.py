# SPDX-License-Identifier: Apache-2.0
"""The parameters of a module and of the one that takes its place, as rows of names."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """A parameter of the original, and those that hold its values in the replacement.

    Attributes:
        original: its name, in which "*" stands for a number.
        ours: theirs, with as many "*". Several lie side by side, in equal parts along their first dimension.
        transposed: whether it is turned round, as weights of transformers' Conv1D are.
        heads: of how many heads the several lie side by side, each head's together, as in GPT-NeoX; 0 for all together.
    """

    original: str
    ours: str | tuple[str, ...]
    transposed: bool = False
    heads: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def parts_of(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The original's values, as the replacement has them."""
        value = value.t() if self.transposed else value
        if len(self.names) == 1:
            return [value]
        if not self.heads:
            return list(value.chunk(len(self.names)))
        by_heads = value.reshape(self.heads, len(self.names), -1, *value.shape[1:])
        return [part.flatten(0, 1) for part in by_heads.unbind(1)]

    def whole_of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The replacement's values, as the original has them."""
        if self.heads and len(parts) > 1:
            value = torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], 1).flatten(0, 2)
        else:
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        return value.t().contiguous() if self.transposed else value


Correspondence = tuple[Row, ...]


def with_names(rows: Iterable[Row], original: str, ours: str) -> Correspondence:
    """The rows of a part, in what is around it."""
    return tuple(
        replace(row, original=original + row.original, ours=tuple(ours + name for name in row.names)) for row in rows
    )


def matched(rows: Correspondence, originals: Iterable[str]) -> dict[str, tuple[Row, list[str]]]:
    """The names of the replacement for each name of the original that a row has."""
    found: dict[str, tuple[Row, list[str]]] = {}
    for name in originals:
        for row in rows:
            if (numbers := _numbers(row.original, name)) is not None:
                found[name] = (row, [_with(each, numbers) for each in row.names])
    return found


def from_original(rows: Correspondence, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A state with the original's names below `prefix`, as the replacement has them; other names stay."""
    rows = with_names(rows, prefix, prefix)
    found = matched(rows, state)
    result: dict[str, Any] = {}
    for name, value in state.items():
        if name not in found:
            result[name] = value
            continue
        row, names = found[name]
        result.update(zip(names, (each.contiguous() for each in row.parts_of(value)), strict=True))
    return _like(state, result)


def to_original(rows: Correspondence, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The reverse of `from_original`. Parts of which some are missing stay as they are."""
    rows = with_names(rows, prefix, prefix)
    result: dict[str, Any] = {}
    used: set[str] = set()
    for name, value in state.items():
        if name in used:
            continue
        for row in rows:
            numbers = next((each for part in row.names if (each := _numbers(part, name)) is not None), None)
            names = None if numbers is None else [_with(part, numbers) for part in row.names]
            if names is not None and all(part in state for part in names):
                result[_with(row.original, numbers)] = row.whole_of([state[part] for part in names])
                used.update(names)
                break
        else:
            result[name] = value
    return _like(state, result)


def is_like(pattern: str, name: str) -> bool:
    """True where "*" in the pattern stands for numbers in the name."""
    return _numbers(pattern, name) is not None


def _numbers(pattern: str, name: str) -> tuple[str, ...] | None:
    found = re.fullmatch(r"(\d+)".join(map(re.escape, pattern.split("*"))), name)
    return None if found is None else found.groups()


def _with(pattern: str, numbers: tuple[str, ...]) -> str:
    parts = pattern.split("*")
    return "".join(part + number for part, number in zip(parts, (*numbers, ""), strict=True))


def _like(state: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """As a state dict is. Its metadata tells versions of modules by their names, which are others now."""
    return OrderedDict(made) if isinstance(state, OrderedDict) else made
