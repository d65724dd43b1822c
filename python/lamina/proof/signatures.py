# SPDX-License-Identifier: Apache-2.0
"""Kinds of regions and of their calls: of each kind one call is proven."""

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lamina.proof.parts import PartOfResult
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.unslicing import kind_before
from lamina.util import pytree

_OF_CALLS = (bool, str, type(None))
_NUMBERS = (int, float)
_TORCHS = frozenset(vars(nn.Module()))

Kind = tuple[Any, ...]


def kinds_of(regions: Mapping[str, nn.Module]) -> dict[str, Kind]:
    """Kinds of regions, of which those that are alike are proven once. Classes, styles, sizes and numbers make a kind,
    but no number that counts the regions, as that of a layer does."""
    kinds = {name: _structure(region) for name, region in regions.items()}
    numbers = {name: _numbers(region) for name, region in regions.items()}
    alike: dict[Kind, list[str]] = defaultdict(list)
    for name, kind in kinds.items():
        alike[kind].append(name)
    for kind, names in alike.items():
        counting = {key for key in numbers[names[0]] if _counts([numbers[name].get(key) for name in names])}
        for name in names:
            rest = tuple((key, value) for key, value in numbers[name].items() if key not in counting)
            kinds[name] = (kind, rest)
    return kinds


class CallKind:
    """Kinds of calls of a region, by what its modules are set to then.

    Args:
        region: the module.
    """

    def __init__(self, region: nn.Module):
        modules = list(region.modules())
        configs = {id(value): value for module in modules for value in vars(module).values() if _is_config(value)}
        self._held = [vars(module) for module in modules] + [vars(config) for config in configs.values()]

    def of(self, args: tuple, kwargs: dict[str, Any]) -> Kind:
        """The kind of a call with these arguments, now."""
        settings = tuple(
            value for held in self._held for name, value in held.items() if type(value) in _OF_CALLS and name[0] != "_"
        )
        given = (tuple(map(_shown, args)), tuple((name, _shown(value)) for name, value in kwargs.items()))
        return torch.is_grad_enabled(), _collected(), settings, given


def _structure(region: nn.Module) -> Kind:
    return tuple(
        (
            path,
            kind_before(module).__module__,
            kind_before(module).__qualname__,
            layers.style_of(module),
            tuple(
                (name, tuple(each.shape), each.dtype) for name, each in module._parameters.items() if each is not None
            ),
        )
        for path, module in region.named_modules(remove_duplicate=False)
    )


def _numbers(region: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in region.named_modules()
        for name, value in vars(module).items()
        if type(value) in _NUMBERS and name not in _TORCHS
    }


def _counts(values: Iterable[Any]) -> bool:
    """True where each is one more than the one before."""
    values = list(values)
    return len(values) > 1 and all(
        type(each) is int and type(before) is int and each == before + 1 for before, each in itertools.pairwise(values)
    )


def _is_config(value: Any) -> bool:
    is_plain = isinstance(value, (*_OF_CALLS, *_NUMBERS, type, dict, list, tuple, torch.Tensor, nn.Module))
    return not is_plain and not callable(value) and "onfig" in type(value).__name__ and hasattr(value, "__dict__")


def _shown(value: Any) -> Any:
    """As much of a value as may decide which operations run."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dim(), value.dtype.is_floating_point, value.requires_grad
    if isinstance(value, PartOfResult):
        return "part", value.part.dim()
    if type(value) in _OF_CALLS:
        return value
    if (held := pytree.children(value)) is not None:
        return type(value).__name__, tuple((label, _shown(child)) for label, child in held)
    return type(value).__qualname__


def _collected() -> tuple[str, ...]:
    """Names of what transformers' hooks collect in this call."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return tuple((capturing and capturing._active_collector.get()) or ())
