# SPDX-License-Identifier: Apache-2.0
"""Calls of modules that other ranks own, and of those that run in a random stream of their own.

One wrapper of nn.Module.__call__, there from the first step on. It costs the other modules one look into a dictionary.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from lamina import _lamina, compiled

_IN_STREAM = -1

# By id(module): the number of each module owned elsewhere, _IN_STREAM for the others that start a stream.
_listed: dict[int, int] = {}
_route: Callable[[int, tuple, dict[str, Any]], Any] | None = None
_original = nn.Module.__call__


def install(
    remote: Mapping[int, int], route: Callable[[int, tuple, dict[str, Any]], Any], streams: Iterable[nn.Module] = ()
) -> None:
    """From now on a call of a module in `remote` is `route(number, args, kwargs)`. One of another module that is in
    `streams` runs in a random stream of its own, if it is made in a step.

    Args:
        remote: the number of each module by id(module).
        route: what carries the call out.
        streams: modules. The caller keeps them, and those in `remote`, alive until `remove`.
    """
    global _route, _original
    _listed.clear()
    _listed.update((id(module), _IN_STREAM) for module in streams)
    _listed.update(remote)
    _route = compiled.outside(route)
    if nn.Module.__call__ is not _call:
        _original = nn.Module.__call__
        nn.Module.__call__ = _call


def remove() -> None:
    """Every call is torch's again."""
    _listed.clear()
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _original


def forget(route: Callable[[int, tuple, dict[str, Any]], Any]) -> None:
    """Ends what `install` did with that route; nothing when another was installed since."""
    if _route == route:
        remove()


def call_here(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a module that this rank owns, hooks included, whatever its class adds around calls: the caller did that."""
    return _original(module, *args, **kwargs)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    number = _listed.get(id(self))
    if number is None:
        return _original(self, *args, **kwargs)
    if number == _IN_STREAM:
        return _lamina.call_in_stream(_original, self, *args, **kwargs)
    return _route(number, args, kwargs)
