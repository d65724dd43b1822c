# SPDX-License-Identifier: Apache-2.0
"""Replacements for the time of a context: of calls of modules, of uses of their attributes, of their making; of
autograd functions."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.autograd import Function

from lamina.util.settings import setting

_lock = threading.Lock()
_makers: list[Callable[[nn.Module], None]] = []  # of those that are inside `creations`
_original_init = nn.Module.__init__


def calls(call: Callable[[Callable, nn.Module, tuple, dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """Inside, `module(*args, **kwargs)` is `call(original, module, args, kwargs)`."""
    original = nn.Module.__call__

    def ours(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    return setting(ours, lambda: original, functools.partial(setattr, nn.Module, "__call__"))


@contextmanager
def attributes(
    set_one: Callable[[Callable, nn.Module, str, Any], None], get_one: Callable[[nn.Module, str], Any]
) -> Iterator[None]:
    """Inside, `module.name = value` is `set_one(original, module, name, value)`, and `module.name` is
    `get_one(module, name)`."""
    original = nn.Module.__setattr__
    nn.Module.__setattr__ = lambda module, name, value: set_one(original, module, name, value)
    nn.Module.__getattribute__ = lambda module, name: get_one(module, name)
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = original


def functions(apply: Callable[[Callable, type, tuple, dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """Inside, `function.apply(*args)` of a torch.autograd.Function is `apply(original, function, args, kwargs)`."""
    before = vars(Function)["apply"]

    def ours(function: type, *args: Any, **kwargs: Any) -> Any:
        return apply(before.__get__(None, function), function, args, kwargs)

    return setting(classmethod(ours), lambda: before, functools.partial(setattr, Function, "apply"))


@contextmanager
def creations(made: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, `made(module)` is called for each module that any thread makes, once however many contexts have it."""
    global _original_init
    with _lock:
        if not _makers:
            _original_init = nn.Module.__init__
            nn.Module.__init__ = _telling(_original_init)
        _makers.append(made)
    try:
        yield
    finally:
        with _lock:
            _makers.remove(made)
            if not _makers:
                nn.Module.__init__ = _original_init


def _telling(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for made in dict.fromkeys(_makers):
            made(self)

    return init
