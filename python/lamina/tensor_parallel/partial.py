# SPDX-License-Identifier: Apache-2.0
"""Whole parameters of modules that compute with parts: each rank has its part's gradient, and these are added.

A module that is called with wholes elsewhere has the same parameters there, whose gradients are whole. So only
calls of the regions of which that was found read a copy. Its gradient is added over the team.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina.tensor_parallel.classes import made

_NAMES = "_lamina_partial"  # of the class of a module with such parameters: their names

_here = threading.local()


Partial = frozenset[tuple[int, str]]  # parameters whose gradients are added, by the id of their module and name


@contextmanager
def inside(parameters: Partial = frozenset()) -> Iterator[None]:
    """Inside, this thread is in a call of a region, in which gradients of these parameters are added."""
    before = added_here()
    _here.parameters = parameters
    try:
        yield
    finally:
        _here.parameters = before


def added_here() -> Partial:
    """The parameters whose gradients are added in the call that this thread is in."""
    return getattr(_here, "parameters", frozenset())


def make_partial(module: nn.Module, names: tuple[str, ...], team: str) -> None:
    """From now on gradients of these parameters are added over a team."""
    known = partial_names(module)
    if new := tuple(name for name in names if name not in known):
        object.__setattr__(module, "__class__", _with_copies(type(module), new, team))


def partial_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module whose gradients are added."""
    return getattr(type(module), _NAMES, ())


@functools.cache
def _with_copies(kind: type, names: tuple[str, ...], team: str) -> type:
    """The class of that name which gives copies of these parameters; they are found before parameters are."""
    known = {_NAMES: (*getattr(kind, _NAMES, ()), *names)}
    return made(kind, (kind,), **known, **{name: _copy_of(name, team) for name in names})


def _copy_of(name: str, team: str) -> property:
    def read(module: Any) -> torch.Tensor | None:
        parameter = module._parameters[name]
        if parameter is None or not (torch.compiler.is_compiling() or (id(module), name) in added_here()):
            return parameter
        return torch.ops.lamina.tp_copy(parameter, team)

    return property(read)
