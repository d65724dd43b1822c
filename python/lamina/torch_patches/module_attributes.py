# SPDX-License-Identifier: Apache-2.0
"""Settings of attributes of modules."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from lamina.torch_patches import compiled
from lamina.util.settings import replace


def install(before: Callable[[nn.Module, str, Any], None], undo: ExitStack) -> None:
    """Until `undo` is closed, `module.name = value` calls `before(module, name, value)`."""
    original = nn.Module.__setattr__

    @compiled.outside
    def set_one(self: nn.Module, name: str, value: Any) -> None:
        before(self, name, value)
        original(self, name, value)

    replace(undo, nn.Module, "__setattr__", set_one, stays=True)
