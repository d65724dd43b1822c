# SPDX-License-Identifier: Apache-2.0
"""Calls of modules that other ranks own.

One wrapper of nn.Module.__call__, there while a model is partitioned. It costs the other modules one look into a
dictionary.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_remote: dict[int, int] = {}  # the number of each module owned elsewhere, by id(module)
_route: Callable[[int, tuple, dict[str, Any]], Any]
_original = nn.Module.__call__


def install(remote: Mapping[int, int], route: Callable[[int, tuple, dict[str, Any]], Any]) -> None:
    """From now on a call of a module in `remote` is `route(number, args, kwargs)`.

    Args:
        remote: the number of each module by id(module). The caller keeps the modules alive until `remove`.
        route: what carries the call out.
    """
    global _route, _original
    _remote.clear()
    _remote.update(remote)
    _route = route
    if nn.Module.__call__ is not _call:
        _original = nn.Module.__call__
        nn.Module.__call__ = _call


def remove() -> None:
    """Every call is local again."""
    _remote.clear()
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _original


def call_here(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a module that this rank owns, hooks included, whatever its class adds around calls: the caller did that."""
    return _original(module, *args, **kwargs)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    number = _remote.get(id(self))
    if number is None:
        return _original(self, *args, **kwargs)
    return _route(number, args, kwargs)
