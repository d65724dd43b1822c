# SPDX-License-Identifier: Apache-2.0
"""Whole parameters of modules that compute with parts: each rank has its part's gradient, and these are added.

A module that is called with wholes elsewhere has the same parameters there, whose gradients are whole. So it is inside
of calls of regions alone that reading one gives a copy, whose gradient is added over the team.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TEAM = "_lamina_partial_over"  # of a module with such parameters: the name of the ranks over which they are added
_NAMES = "_lamina_partial"  # these
NOTES = (_TEAM, _NAMES)

_here = threading.local()


@contextmanager
def inside(is_inside: bool = True) -> Iterator[None]:
    """Inside, this thread is in a call of a region, or not."""
    before = is_in_region()
    _here.is_in_region = is_inside
    try:
        yield
    finally:
        _here.is_in_region = before


def is_in_region() -> bool:
    """True where this thread is in a call of a region."""
    return getattr(_here, "is_in_region", False)


def make_partial(module: nn.Module, names: tuple[str, ...], team: str) -> None:
    """From now on gradients of these parameters are added over a team."""
    known = module.__dict__.get(_NAMES, ())
    if new := tuple(name for name in names if name not in known):
        module.__dict__[_TEAM], module.__dict__[_NAMES] = team, (*known, *new)
        object.__setattr__(module, "__class__", _with_copies(type(module), new))


def partial_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module whose gradients are added."""
    return module.__dict__.get(_NAMES, ())


@functools.cache
def _with_copies(kind: type, names: tuple[str, ...]) -> type:
    """The class of that name which gives copies of these parameters; they are found before parameters are."""
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), about | {name: _copy_of(name) for name in names})


def _copy_of(name: str) -> property:
    def read(module: Any) -> torch.Tensor | None:
        parameter = module._parameters[name]
        if parameter is None or not (torch.compiler.is_compiling() or is_in_region()):
            return parameter
        return torch.ops.lamina.tp_copy(parameter, module.__dict__[_TEAM])

    return property(read)
