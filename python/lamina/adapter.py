# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

from typing import Any

from torch import nn

from lamina import _current, intercept
from lamina.arguments import ArgumentCheck

_UNIFORM = (b"\x00", b"\x01")


def run_module(number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs module `number`, which this rank owns, under the `state` that `capture_state` gave on another rank.

    Errors:
        UsageError: it changed an argument that is no tensor. And whatever it raises.
    """
    module = _modules()[number]
    _apply_state(module, state)
    check = ArgumentCheck(module, _name(number), args, kwargs)
    output = intercept.call_here(module, args, kwargs)
    check.after()
    return output


def capture_state(number: int) -> bytes:
    """The training flags of module `number` and all under it: one byte when they are equal, else one per module."""
    flags = bytes(module.training for module in _modules()[number].modules())
    uniform = _UNIFORM[flags[0]]
    return uniform if flags == uniform * len(flags) else flags


def _name(number: int) -> str:
    return _current.job().model._partitioned.tree.names[number] or "the model"


def _modules() -> list[nn.Module]:
    return _current.job().model._partitioned.tree.modules


def _apply_state(module: nn.Module, state: bytes) -> None:
    modules = list(module.modules())
    flags = state * len(modules) if len(state) == 1 else state
    for part, training in zip(modules, flags, strict=True):
        if part.training != bool(training):
            part.training = bool(training)
