# SPDX-License-Identifier: Apache-2.0
"""`zero_grad` of any module also forgets what is summed for the gradients of shards. `.grad` of a sharded parameter is
that of its shard, and a tensor that stands for a parameter in an optimizer has its part."""

from collections.abc import Callable

from torch import nn

from lamina import _lamina

_original = nn.Module.zero_grad
_forget: list[Callable[[nn.Module, bool], None]] = []  # one at most


def install(forget: Callable[[nn.Module, bool], None], sharding: _lamina.Sharding) -> None:
    """From now on `forget(module, set_to_none)` is called after each, and sharded parameters have gradients."""
    _forget[:] = [forget]
    nn.Module.zero_grad = _zero_grad
    _lamina.watch_parameters(nn.Parameter, sharding)


def give_gradients(optimizer: _lamina.Optimizer) -> None:
    """From now on what stands for parameters in an optimizer's groups has its part of their gradients."""
    _lamina.watch_parameters(nn.Parameter, optimizer=optimizer)


def remove() -> None:
    """All is torch's again."""
    _forget.clear()
    nn.Module.zero_grad = _original
    _lamina.forget_parameters(nn.Parameter)


def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    _original(self, set_to_none)
    for forget in _forget:
        forget(self, set_to_none)
