# SPDX-License-Identifier: Apache-2.0
"""Calls of modules that other ranks own, and of those that run in a random stream of their own.

One wrapper of nn.Module.__call__, there from the first step on. It costs the other modules one look into a dictionary.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.torch_patches import compiled
from lamina.util import pytree

Route = Callable[[int, tuple, dict[str, Any]], Any]

Call = Callable[[nn.Module, tuple, dict[str, Any]], Any]

Begin = Callable[[bool, tuple], _lamina.HookedCall]


class ModuleCalls:
    """Modules of which a call is not torch's own, and what it is.

    A call of a module in `remote` is `route(number, args, kwargs)`. One of another module that is in `streams` runs in
    a random stream of its own, if it is made in a step.

    Args:
        remote: the number of each module by id(module).
        route: what carries the call out.
        streams: modules. The caller keeps them, and those in `remote`, alive until `remove`.
        anywhere: the number of each module that is called where its arguments lie, by id(module): only calls with
            arguments that lie elsewhere are routed.
        hooked: what begins a call of a module of this rank that has hooks, by id(module); see [Note: call hooks] in
            lamina/model/call_hooks.h. It is told whether the call came from another rank, and what it is given: a tuple
            of positional arguments and a dictionary.
        whole: modules of this rank that write state, kept alive likewise: they have their arguments before they begin,
            so that no other microbatch comes in between. See [Note: updates] in shared_state/attributes.py.
        original: torch's call, or the one of somebody who had replaced that before.

    Attributes:
        calls: by id(module), what a call of it is, where that is not the original.
        is_in_place: whether ours is called in the place of the original.
        hooks_see_streams: whether a module's random stream has begun when its hooks do, as where it is called remotely.
    """

    def __init__(
        self,
        remote: Mapping[int, int],
        route: Route | None,
        streams: Iterable[nn.Module],
        anywhere: Mapping[int, int],
        hooked: Mapping[int, Begin],
        whole: Iterable[nn.Module],
        original: Callable,
    ):
        self.remote, self.anywhere, self.hooked = dict(remote), dict(anywhere), dict(hooked)
        self.in_stream = {id(module): True for module in streams}
        self.whole = {id(module): True for module in whole}
        self.names: dict[int, str] = {}
        self.given = route
        self.route = None if route is None else compiled.outside(route)  # as compiled code may call it
        self.original, self.is_in_place = original, False
        self.hooks_see_streams = False
        self.calls: dict[int, Call] = {}
        self._say_calls(self.in_stream | self.whole | self.remote | self.anywhere | self.hooked)

    def name_turns(self, modules: Mapping[str, nn.Module]) -> None:
        """See the function of that name."""
        before = list(self.names)
        self.names = {id(module): name for name, module in modules.items() if id(module) not in self.anywhere}
        self._say_calls([*before, *self.names])

    def _say_calls(self, keys: Iterable[int]) -> None:
        """Notes what a call of each of these modules is: by the first that it is listed in."""
        ways = (
            (self.remote, _call_remote),
            (self.anywhere, _call_anywhere),
            (self.hooked, _call_hooked),
            (self.names, _call_named),
            (self.whole, _call_plain),
            (self.in_stream, _call_in_stream),
        )
        for key in keys:
            self.calls.pop(key, None)
            self.calls.update((key, call) for listed, call in reversed(ways) if key in listed)


def install(
    remote: Mapping[int, int],
    route: Route,
    streams: Iterable[nn.Module] = (),
    anywhere: Mapping[int, int] | None = None,
    hooked: Mapping[int, Begin] | None = None,
    whole: Iterable[nn.Module] = (),
    hooks_see_streams: bool = False,
) -> None:
    """From now on calls of modules are what `ModuleCalls` says of these, and of no others."""
    global _current
    original = _current.original if _current.is_in_place else nn.Module.__call__
    _current = ModuleCalls(remote, route, streams, anywhere or {}, hooked or {}, whole, original)
    _current.is_in_place, _current.hooks_see_streams = True, hooks_see_streams
    if nn.Module.__call__ is original:  # else what somebody put around our wrapper calls it
        nn.Module.__call__ = _call


@contextmanager
def replaced(streams: Iterable[nn.Module], hooked: Mapping[int, Begin]) -> Iterator[None]:
    """Meanwhile calls of modules are torch's own, but for streams and hooks; then they are again what they were."""
    global _current
    before, torchs = _current, nn.Module.__call__
    original = before.original if before.is_in_place else torchs
    _current = ModuleCalls({}, None, streams, {}, hooked, (), original)
    _current.is_in_place, _current.hooks_see_streams = True, True
    if not before.is_in_place:
        nn.Module.__call__ = _call
    try:
        yield
    finally:
        nn.Module.__call__, _current = torchs, before


def name_turns(modules: Mapping[str, nn.Module]) -> None:
    """From now on what these modules of this rank do, forward and backward, is recorded under their names, which takes
    a little time; under those of no others. Nothing without an `install` before."""
    _current.name_turns(modules)


def remove() -> None:
    """Every call is torch's again. Where somebody put a wrapper around ours, ours stays and does nothing."""
    global _current
    _current = _no_calls(_current.original)
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _current.original
    _current.is_in_place = nn.Module.__call__ is not _current.original


def tell_compiler() -> None:
    """Tells torch's compiler which function torch's own calls are, where it was imported while they were ours: it makes
    nothing of such a call but the module's forward, and would leave out what ours do."""
    known = sys.modules.get("torch._dynamo.variables.nn_module")
    if known is not None and known.unpatched_nn_module_call is _call:
        known.unpatched_nn_module_call = _current.original


def forget(route: Route) -> None:
    """Ends what `install` did with that route; nothing when another was installed since."""
    if _current.given == route:
        remove()


def call_here(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a module that this rank owns, hooks included, whatever its class adds around calls: the caller did that."""
    return _current.original(module, *args, **kwargs)


def call_served(module: nn.Module, *args: Any) -> Any:
    """Calls a module of this rank for another one, which has called several at once."""
    return _call_hooked(module, args, {}, remote=True) if id(module) in _current.hooked else module(*args)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = _current.calls.get(id(self))
    return _current.original(self, *args, **kwargs) if call is None else call(self, args, kwargs)


def _call_remote(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _current.route(_current.remote[id(module)], args, kwargs)


@compiled.left_alone
def _call_in_stream(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _lamina.call_in_stream(_current.original, module, *args, **kwargs)


@compiled.left_alone
def _call_hooked(module: nn.Module, args: tuple, kwargs: dict[str, Any], remote: bool = False) -> Any:
    if id(module) in _current.in_stream and _current.hooks_see_streams:
        return _lamina.call_in_stream(_call_between_hooks, module, args, kwargs, remote, True)
    return _call_between_hooks(module, args, kwargs, remote, False)


def _call_between_hooks(module: nn.Module, args: tuple, kwargs: dict[str, Any], remote: bool, has_stream: bool) -> Any:
    call = _begin(module, args, kwargs, remote)
    try:
        output = (_call_named if id(module) in _current.names else _call_plain)(module, args, kwargs, has_stream)
    except BaseException:
        call.fail()
        raise
    _end(call, output)
    return output


@compiled.outside
def _begin(module: nn.Module, args: tuple, kwargs: dict[str, Any], remote: bool) -> _lamina.HookedCall:
    return _current.hooked[id(module)](remote, (args, kwargs))


@compiled.outside
def _end(call: _lamina.HookedCall, output: Any) -> None:
    call.end(pytree.tensors(output))


def _call_plain(module: nn.Module, args: tuple, kwargs: dict[str, Any], has_stream: bool = False) -> Any:
    if id(module) in _current.whole and not torch.compiler.is_compiling():  # compiled code has values in any case
        for tensor in pytree.tensors((args, kwargs)):
            _lamina.materialise(tensor)
    if id(module) in _current.in_stream and not has_stream:
        return _call_in_stream(module, args, kwargs)
    return _current.original(module, *args, **kwargs)


def _call_anywhere(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    lies_elsewhere = any(
        isinstance(each, torch.Tensor) and _lamina.is_pending(each) for each in (*args, *kwargs.values())
    )
    # Activation checkpointing counts what is saved here, now and when it computes again: by then the value may be here.
    if lies_elsewhere and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return _current.route(_current.anywhere[id(module)], args, kwargs)
    return _call_hooked(module, args, kwargs) if id(module) in _current.hooked else _call_plain(module, args, kwargs)


def _call_named(module: nn.Module, args: tuple, kwargs: dict[str, Any], has_stream: bool = False) -> Any:
    key = id(module)
    name = _current.names[key]
    outer = _lamina.name_turn(name)
    try:
        output = _call_plain(module, args, kwargs, has_stream)
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


def _no_calls(original: Callable) -> ModuleCalls:
    return ModuleCalls({}, None, (), {}, {}, (), original)


_current = _no_calls(nn.Module.__call__)
