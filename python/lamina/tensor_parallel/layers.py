# SPDX-License-Identifier: Apache-2.0
"""Layers of which this rank has a slice, and the modules around them: see [Note: slicing plan] in plans.py.

A sliced layer stays the same object, with the same parameters, and gets another class: the one it had, with another
forward. So names, hooks and what the script keeps of it stay as they are.
"""

import functools
from typing import Any

import torch
from torch import nn

from lamina.tensor_parallel.dropout import HeadDropout

# As `_lamina.Slicing`.
Slicing = tuple[int, list[tuple[int, int]]]

_SLICES = "_lamina_slices"  # by the parameter's name
_TEAM = "_lamina_team"
_HEADS = "_lamina_heads"


class _ByColumns:
    """A layer that has some of the outputs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ops.lamina.tp_copy(input, self.__dict__[_TEAM]))


class _ByRows:
    """A layer that has some of the inputs: what the ranks compute is added, and then the bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.t()
        sum = torch.ops.lamina.tp_all_reduce(nn.functional.linear(input, weight), self.__dict__[_TEAM])
        return sum if self.bias is None else sum + self.bias


class _Heads:
    """A module that has some of the heads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        with HeadDropout(*self.__dict__[_HEADS]):
            return super().forward(*args, **kwargs)


def become_columns(layer: nn.Module, slices: dict[str, Slicing], team: str) -> None:
    """Makes a layer one whose outputs are sliced."""
    _become(_ByColumns, layer, slices, team)


def become_rows(layer: nn.Module, slices: dict[str, Slicing], team: str) -> None:
    """Makes a layer one whose inputs are sliced."""
    _become(_ByRows, layer, slices, team)


def become_heads(module: nn.Module, own: int, first: int, all: int) -> None:
    """Makes a module one that has so many heads, from this one on, of all."""
    module.__dict__[_HEADS] = (own, first, all)
    module.__class__ = _with(_Heads, type(module))


def is_sliced(module: nn.Module) -> bool:
    """True for a layer of which this rank has a slice."""
    return _SLICES in module.__dict__


def slicings(root: nn.Module) -> dict[int, Slicing]:
    """How the parameters under a module are sliced, by id(parameter)."""
    return {
        id(module._parameters[name]): slicing
        for module in root.modules()
        for name, slicing in module.__dict__.get(_SLICES, {}).items()
    }


def _become(mixin: type, layer: nn.Module, slices: dict[str, Slicing], team: str) -> None:
    layer.__dict__[_SLICES], layer.__dict__[_TEAM] = slices, team
    layer.__class__ = _with(mixin, type(layer))


@functools.cache
def _with(mixin: type, kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names)
