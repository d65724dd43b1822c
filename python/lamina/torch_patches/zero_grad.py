# SPDX-License-Identifier: Apache-2.0
"""`zero_grad` of any module, which also forgets the gradients of shards: these are not its parameters' own."""

from collections.abc import Callable

from torch import nn

_original = nn.Module.zero_grad
_forget: list[Callable[[nn.Module, bool], None]] = []  # one at most


def install(forget: Callable[[nn.Module, bool], None]) -> None:
    """From now on `forget(module, set_to_none)` is called after each."""
    _forget[:] = [forget]
    nn.Module.zero_grad = _zero_grad


def remove() -> None:
    """It is torch's again."""
    _forget.clear()
    nn.Module.zero_grad = _original


def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    _original(self, set_to_none)
    for forget in _forget:
        forget(self, set_to_none)
