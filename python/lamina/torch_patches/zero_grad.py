# SPDX-License-Identifier: Apache-2.0
"""`zero_grad` of any module also forgets what is summed for the gradients of shards. `.grad` of a sharded parameter is
that of its shard, and a tensor that stands for a parameter in an optimizer has its part."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from lamina import _lamina
from lamina.util.settings import replace


def install(forget: Callable[[nn.Module, bool], None], sharding: _lamina.Sharding, undo: ExitStack) -> None:
    """Until `undo` is closed, `forget(module, set_to_none)` is called after each, and sharded parameters have
    gradients."""
    original = nn.Module.zero_grad

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        forget(self, set_to_none)

    replace(undo, nn.Module, "zero_grad", zero_grad)
    _lamina.watch_parameters(nn.Parameter, sharding)
    undo.callback(_lamina.forget_parameters, nn.Parameter)


def give_gradients(optimizer: _lamina.Optimizer, undo: ExitStack) -> None:
    """Until `undo` is closed, what stands for parameters in an optimizer's groups has its part of their gradients."""
    _lamina.watch_parameters(nn.Parameter, optimizer=optimizer)
    undo.callback(_lamina.forget_parameters, nn.Parameter)
