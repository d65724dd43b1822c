# SPDX-License-Identifier: Apache-2.0
"""Kinds of regions and of their calls: of each kind one call is proven."""

import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import torch
from torch import nn

from lamina.proof.parts import PartOfResult
from lamina.script_state.kinds import codes
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.unslicing import attributes_before, kind_before
from lamina.util import pytree

_OF_CALLS = (bool, str, type(None))
_NUMBERS = (int, float)
_SIMPLE = frozenset((*_OF_CALLS, *_NUMBERS))
_SMALL = 16  # of numbers among arguments, which choose rather than count
_MOST = 16  # elements of a container that is looked at
_LIBRARIES = ("torch", "transformers", "lamina", "torchvision", "timm", "diffusers")
_TORCHS = frozenset(vars(nn.Module()))

Kind = tuple[Any, ...]


def kinds_of(regions: Mapping[str, nn.Module]) -> dict[str, Kind]:
    """Kinds of regions, of which those that are alike are proven once. Classes, styles, sizes and numbers make a kind,
    but no number that counts the regions, as that of a layer does. They are those before the cut, for ranks are to
    agree which are alike: of two widths one rank may have the same part, and another one not."""
    kinds = {name: _structure(region) for name, region in regions.items()}
    numbers = {name: _numbers(region) for name, region in regions.items()}
    alike: dict[Kind, list[str]] = defaultdict(list)
    for name, kind in kinds.items():
        alike[kind].append(name)
    for kind, names in alike.items():
        counting = {
            key
            for key in numbers[names[0]]
            if _counts([numbers[name].get(key) for name in names]) and not _is_read(regions[names[0]], *key)
        }
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
        self._modules = modules = list(region.modules())
        configs = {id(value): value for module in modules for value in vars(module).values() if _is_config(value)}
        self._held = [vars(module) for module in modules] + [vars(config) for config in configs.values()]

    def of(self, args: tuple, kwargs: dict[str, Any]) -> Kind:
        """The kind of a call with these arguments, now."""
        settings = tuple(
            value for held in self._held for name, value in held.items() if type(value) in _OF_CALLS and name[0] != "_"
        )
        settings += tuple(
            _function(value)
            for held in self._held
            for name, value in held.items()
            if name[0] != "_" and type(value) not in _SIMPLE and not isinstance(value, (nn.Module, torch.Tensor))
        )
        settings += tuple(tuple(map(type, module._modules.values())) for module in self._modules if module._modules)
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
                (name, tuple(layers.whole_shape(module, name) or each.shape), each.dtype)
                for name, each in module._parameters.items()
                if each is not None
            ),
        )
        for path, module in region.named_modules(remove_duplicate=False)
    )


def _numbers(region: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in region.named_modules()
        for name, value in attributes_before(module).items()
        if type(value) in _NUMBERS and name not in _TORCHS
    }


def _is_read(region: nn.Module, path: str, name: str) -> bool:
    """True where code of a script's class reads that number, which may decide what it computes."""
    kind = kind_before(region.get_submodule(path))
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    functions = [
        value
        for each in kind.__mro__
        if each is not nn.Module
        for key, value in vars(each).items()
        if key != "__init__" and isinstance(value, FunctionType)
    ]
    return any(name in code.co_names for each in functions for code in codes(each.__code__))


def _function(value: Any, depth: int = 4) -> Any:
    """A function, or a small container of plain values, as a part of a kind: two functions of one code that see the
    same are one."""
    if isinstance(value, (*_OF_CALLS, *_NUMBERS, BuiltinFunctionType)):
        return value
    below = functools.partial(_function, depth=depth - 1)
    if depth and isinstance(value, FunctionType):
        return value.__code__, tuple(map(below, map(_content, value.__closure__ or ()))), below(value.__defaults__)
    if depth and isinstance(value, functools.partial):
        return below(value.func), below(value.args), below(value.keywords)
    if depth and isinstance(value, (tuple, list)) and len(value) <= _MOST:
        return type(value), tuple(map(below, value))
    if depth and type(value) is dict and len(value) <= _MOST:
        return dict, tuple((str(key), below(each)) for key, each in value.items())
    return value if isinstance(value, type) else type(value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


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
    if type(value) in _OF_CALLS or (type(value) is int and abs(value) <= _SMALL):
        return value
    if (held := pytree.children(value)) is not None:
        return type(value).__name__, tuple((label, _shown(child)) for label, child in held)
    return type(value).__qualname__


def _collected() -> tuple[str, ...]:
    """Names of what transformers' hooks collect in this call."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return tuple((capturing and capturing._active_collector.get()) or ())
