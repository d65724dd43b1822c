# SPDX-License-Identifier: Apache-2.0
"""The heads of attention of a module whose layers are sliced: those of queries and of keys that a rank has."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina.errors import UsageError, refusal

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep")  # heads per head of keys
_WIDTHS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")  # features of a head
_SIZES = ("split_size", "all_head_size", "inner_dim")  # features of all heads


@dataclass(frozen=True)
class Share:
    """A rank's part of positions: so many, from the first of them on, of all."""

    own: int
    first: int
    all: int

    def times(self, unit: int) -> "Share":
        return Share(self.own * unit, self.first * unit, self.all * unit)


def share(units: int, degree: int, index: int) -> Share:
    """As [Note: layout] of lamina/layout/ shares units out: the last ranks get fewer."""
    most = -(-units // degree)
    first = min(index * most, units)
    return Share(min(most, units - first), first, units)


@dataclass(frozen=True)
class Heads:
    """Heads of a module, on a rank of a TP_GROUP. With at least as many heads of keys as ranks each rank has whole
    groups, heads with those of their keys. With fewer, ranks compute the same heads of keys for their own.

    Attributes:
        module: whose they are.
        count, keys: how many heads, of queries and of keys.
        width: features of a head; None where the module does not say.
        degree, index: of the team, and this rank's.
        said: the name under which the script says that the module has their number.
    """

    module: nn.Module
    count: int
    keys: int
    width: int | None
    degree: int
    index: int
    said: str | None = None

    @property
    def units(self) -> int:
        """How many parts there are that are never torn."""
        return self.keys if self.keys >= self.degree else self.count

    @property
    def own(self) -> Share:
        return share(self.units, self.degree, self.index).times(self.count // self.units)

    def are_shared_keys(self, extent: int) -> bool:
        """True for a layer with so many outputs that gives keys or values of which the ranks have the same."""
        return self.keys < min(self.degree, self.count) and extent == self.keys * (self.width or 0)

    def own_keys(self) -> list[int]:
        """The heads of keys here: each for as many heads, or else one for each head."""
        group = self.count // self.keys
        of_heads = [head // group for head in range(self.own.first, self.own.first + self.own.own)]
        counts = {key: of_heads.count(key) for key in of_heads}
        return list(counts) if len(set(counts.values())) == 1 else of_heads

    def unit_of(self, name: str, extent: int) -> int:
        """How many of these features are never torn."""
        unit, rest = divmod(extent, self.units)
        if rest or (self.width and unit % self.width):
            raise UsageError(
                f"{name} has {extent} features, which are no whole number of them for each of {self.units} heads of "
                f"{type(self.module).__name__}: leave the layer out of the plan",
                code="tp-layer",
            )
        return unit

    def attributes(self) -> dict[str, Any]:
        """The module's numbers of heads, and sizes of all heads, as they are on this rank. An object that has one is a
        copy, for other modules may have it, too."""
        own, keys = self.own.own, len(self.own_keys())
        result: dict[str, Any] = {name: own for name in _COUNTS if whole_number(self.module, name)}
        result |= {name: keys for name in _KEY_COUNTS if whole_number(self.module, name)}
        result |= {name: own // keys for name in _GROUPS if whole_number(self.module, name)}
        for name in _SIZES:
            size = whole_number(self.module, name)
            if size and size % self.count == 0:
                result[name] = size // self.count * own
        if self.said is not None:
            name, _, below = self.said.partition(".")
            result[name] = _with_number(self.module.__dict__[name], below, own)
        return result


def heads_of(
    module: nn.Module,
    columns: Iterable[int],
    rows: Iterable[int],
    degree: int,
    index: int,
    first_rank: str,
    said: str | int | None = None,
) -> Heads | None:
    """The heads of a module; None where it has none.

    Args:
        columns: the outputs of its layers cut by columns.
        rows: the inputs of those cut by rows.
        first_rank: says whose degree that is.
        said: the name under which some modules have the number of heads, or that number, of those that it divides.

    Errors:
        UsageError: a rank would have none.
    """
    columns, rows = list(columns), list(rows)
    width = next(filter(None, (whole_number(module, name) for name in _WIDTHS)), None)
    count = next(filter(None, (whole_number(module, name) for name in _COUNTS)), None)
    if said is not None and (found := _said_number(module, said, [*columns, *rows])) is not None:
        count = found
        if width is None and rows and rows[0] % count == 0:
            width = rows[0] // count
    else:
        said = None
    if count is None and width is not None:
        count = max(1, (rows[0] if rows else max(columns)) // width)
    if count is None:
        return None
    keys = next(filter(None, (whole_number(module, name) for name in _KEY_COUNTS)), None)
    if keys is None:
        keys = max(1, min(count, min(columns) // width)) if width else count
    kind = type(module).__name__
    if count % keys:
        raise UsageError(f"{kind} has {count} heads, and {keys} of keys, which does not divide that", code="tp-layer")
    heads = Heads(module, count, keys, width, degree, index, said if isinstance(said, str) else None)
    if share(heads.units, degree, degree - 1).own == 0:
        has = f"{kind} has {count} heads, in {heads.units} parts that are not torn"
        raise refusal("some-without-slices", has, first_rank)
    return heads


def _said_number(module: nn.Module, said: str | int, sizes: list[int]) -> int | None:
    """The number of heads that a module has by what the script says; None for none."""
    if isinstance(said, int):
        return said if all(size % said == 0 for size in sizes) else None
    name, _, below = said.partition(".")
    value = module.__dict__.get(name)
    for each in filter(None, below.split(".")):
        value = getattr(value, each, None)
    return value if type(value) is int and value > 0 else None


def _with_number(value: Any, name: str, number: int) -> Any:
    """A copy of an object that has this number under a name; the number itself without one."""
    if not name:
        return number
    other = copy.copy(value)
    first, _, below = name.partition(".")
    setattr(other, first, _with_number(getattr(value, first), below, number))
    return other


def whole_number(module: nn.Module, name: str) -> int | None:
    """A positive number that a module has under a name; None for none."""
    value = module.__dict__.get(name)
    return value if type(value) is int and value > 0 else None
