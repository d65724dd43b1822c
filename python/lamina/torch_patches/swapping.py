# SPDX-License-Identifier: Apache-2.0
"""Parameters that have other values for the time of a call: torch.func.functional_call and parametrize.cached().

Both change modules, or torch, for the whole process, while microbatches take turns in it: another one would compute
with what one has swapped, or with weights that it has cached, and its graph. And neither reaches what other ranks own.
So they are allowed where microbatches run one after the other, on what is here. That a call would meet swapped
parameters of another rank `calls.remote_call` sees at the call.
"""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, stateless

from lamina import _lamina
from lamina.errors import UsageError

_ONE_AT_A_TIME = "set active_microbatches to 1 for it"

_original = stateless._reparametrize_module
_modules: set[int] = set()  # ids of the model's; their owner keeps them alive
_in_turns = False


def install(modules: Iterable[nn.Module], in_turns: bool) -> None:
    """From now on what would be wrong is an error.

    Args:
        modules: the model's.
        in_turns: whether several microbatches may be under way.
    """
    global _in_turns
    _modules.clear()
    _modules.update(map(id, modules))
    _in_turns = in_turns
    stateless._reparametrize_module = _swap


def remove() -> None:
    """Ends `install`."""
    _modules.clear()
    if stateless._reparametrize_module is _swap:
        stateless._reparametrize_module = _original


def caches() -> bool:
    """True where weights are cached now."""
    return parametrize._cache_enabled > 0


def refuse_cached(name: str, modules: list[nn.Module]) -> None:
    """Raises UsageError where a call of module `name`, with all under it `modules`, would not see on its rank the
    weights that are cached here."""
    if _in_turns:
        raise UsageError(
            f"{name}, which lives on another rank, is called in parametrize.cached(): {_ONE_AT_A_TIME}",
            code="step-swapped",
        )
    if any(map(parametrize.is_parametrized, modules)):
        raise UsageError(
            f"{name}, which lives on another rank and has parametrizations, is called in parametrize.cached(), which "
            "does not reach it: use it in a module of that rank, or place it with its caller",
            code="step-swapped",
        )


@functools.wraps(_original)
def _swap(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager:
    if _in_turns and _lamina.microbatch() >= 0 and any(id(part) in _modules for part in module.modules()):
        raise UsageError(
            f"functional_call() of a part of the model, several microbatches of which run in turns: {_ONE_AT_A_TIME}",
            code="step-swapped",
        )
    return _original(module, *args, **kwargs)
