# SPDX-License-Identifier: Apache-2.0
"""Calls of modules that other ranks own, and of those that run in a random stream of their own.

One wrapper of nn.Module.__call__, there from the first step on. It costs the other modules one look into a dictionary.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.torch_patches import compiled
from lamina.util import pytree

Route = Callable[[int, tuple, dict[str, Any]], Any]

Call = Callable[[nn.Module, tuple, dict[str, Any]], Any]

_calls: dict[int, Call] = {}  # by id(module): what a call of it is, where that is not torch's own
_remote: dict[int, int] = {}  # the following by id(module), too
_anywhere: dict[int, int] = {}
_hooked: dict[int, Callable[[bool], _lamina.HookedCall]] = {}
_names: dict[int, str] = {}
_in_stream: dict[int, bool] = {}
_whole: dict[int, bool] = {}
_given: Route | None = None  # the route as it was given
_route: Route | None = None  # the same, as compiled code may call it
_original = nn.Module.__call__
_installed = False


def install(
    remote: Mapping[int, int],
    route: Route,
    streams: Iterable[nn.Module] = (),
    anywhere: Mapping[int, int] | None = None,
    hooked: Mapping[int, Callable[[bool], _lamina.HookedCall]] | None = None,
    whole: Iterable[nn.Module] = (),
) -> None:
    """From now on a call of a module in `remote` is `route(number, args, kwargs)`. One of another module that is in
    `streams` runs in a random stream of its own, if it is made in a step.

    Args:
        remote: the number of each module by id(module).
        route: what carries the call out.
        anywhere: the number of each module that is called where its arguments lie, by id(module): only calls with
            arguments that lie elsewhere are routed.
        streams: modules. The caller keeps them, and those in `remote`, alive until `remove`.
        hooked: what begins a call of a module of this rank that has hooks, by id(module); see [Note: call hooks] in
            lamina/model/call_hooks.h. It is told whether the call came from another rank.
        whole: modules of this rank that write state, kept alive likewise: they have their arguments before they begin,
            so that no other microbatch comes in between. See [Note: updates] in module_attributes.py.
    """
    global _given, _route, _original, _installed
    _forget()
    _in_stream.update((id(module), True) for module in streams)
    _whole.update((id(module), True) for module in whole)
    _remote.update(remote)
    _anywhere.update(anywhere or {})
    _hooked.update(hooked or {})
    _say_calls(_in_stream | _whole | _remote | _anywhere | _hooked)
    _given, _route = route, compiled.outside(route)
    if not _installed:
        _original = nn.Module.__call__
    if nn.Module.__call__ is _original:  # else what somebody put around our wrapper calls it
        nn.Module.__call__ = _call
    _installed = True


def name_turns(modules: Mapping[str, nn.Module]) -> None:
    """From now on what these modules of this rank do, forward and backward, is recorded under their names, which takes
    a little time; under those of no others. Nothing without an `install` before."""
    before = list(_names)
    _names.clear()
    _names.update((id(module), name) for name, module in modules.items() if id(module) not in _anywhere)
    _say_calls([*before, *_names])


def remove() -> None:
    """Every call is torch's again. Where somebody put a wrapper around ours, ours stays and does nothing."""
    global _given, _route, _installed
    _forget()
    _given = _route = None
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _original
    _installed = nn.Module.__call__ is not _original


def tell_compiler() -> None:
    """Tells torch's compiler which function torch's own calls are, where it was imported while they were ours: it makes
    nothing of such a call but the module's forward, and would leave out what ours do."""
    known = sys.modules.get("torch._dynamo.variables.nn_module")
    if known is not None and known.unpatched_nn_module_call is _call:
        known.unpatched_nn_module_call = _original


def forget(route: Route) -> None:
    """Ends what `install` did with that route; nothing when another was installed since."""
    if _given == route:
        remove()


def call_here(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a module that this rank owns, hooks included, whatever its class adds around calls: the caller did that."""
    return _original(module, *args, **kwargs)


def call_served(module: nn.Module, *args: Any) -> Any:
    """Calls a module of this rank for another one, which has called several at once."""
    return _call_hooked(module, args, {}, remote=True) if id(module) in _hooked else module(*args)


def _forget() -> None:
    for kept in (_calls, _remote, _anywhere, _hooked, _names, _in_stream, _whole):
        kept.clear()


def _say_calls(keys: Iterable[int]) -> None:
    """Notes what a call of each of these modules is: by the first that it is listed in."""
    ways = (
        (_remote, _call_remote),
        (_anywhere, _call_anywhere),
        (_hooked, _call_hooked),
        (_names, _call_named),
        (_whole, _call_plain),
        (_in_stream, _call_in_stream),
    )
    for key in keys:
        _calls.pop(key, None)
        _calls.update((key, call) for listed, call in reversed(ways) if key in listed)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = _calls.get(id(self))
    return _original(self, *args, **kwargs) if call is None else call(self, args, kwargs)


def _call_remote(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _route(_remote[id(module)], args, kwargs)


@compiled.left_alone
def _call_in_stream(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _lamina.call_in_stream(_original, module, *args, **kwargs)


@compiled.left_alone
def _call_hooked(module: nn.Module, args: tuple, kwargs: dict[str, Any], remote: bool = False) -> Any:
    call = _hooked[id(module)](remote)
    try:
        output = (_call_named if id(module) in _names else _call_plain)(module, args, kwargs)
    except BaseException:
        call.fail()
        raise
    _end(call, output)
    return output


@compiled.outside
def _end(call: _lamina.HookedCall, output: Any) -> None:
    call.end(pytree.tensors(output))


def _call_plain(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    if id(module) in _whole and not torch.compiler.is_compiling():  # compiled code has values in any case
        for tensor in pytree.tensors((args, kwargs)):
            _lamina.materialise(tensor)
    if id(module) in _in_stream:
        return _call_in_stream(module, args, kwargs)
    return _original(module, *args, **kwargs)


def _call_anywhere(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    if any(isinstance(each, torch.Tensor) and _lamina.is_pending(each) for each in (*args, *kwargs.values())):
        return _route(_anywhere[id(module)], args, kwargs)
    return _call_hooked(module, args, kwargs) if id(module) in _hooked else _call_plain(module, args, kwargs)


def _call_named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    key = id(module)
    name = _names[key]
    outer = _lamina.name_turn(name)
    try:
        output = _call_plain(module, args, kwargs)
    finally:
        _lamina.name_turn(outer)
    for tensor in pytree.tensors(output):
        _name_backward(tensor, name)
    return output


def _name_backward(output: torch.Tensor, name: str) -> None:
    """Work that follows the gradient of `output` in a backward is the module's, until it reaches another one's
    output."""

    def reached(gradient: torch.Tensor) -> None:
        _lamina.name_turn(name)

    if output.requires_grad and torch.is_grad_enabled() and not _lamina.is_pending(output):
        output.register_hook(reached)
