# SPDX-License-Identifier: Apache-2.0
"""Parameters that have other values for the time of a call: torch.func.functional_call()."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.nn.utils import stateless

from lamina.util.settings import replace


def install(before: Callable[[nn.Module], None], undo: ExitStack) -> None:
    """Until `undo` is closed, `before(module)` is called before parameters of a module are swapped."""
    original = stateless._reparametrize_module

    @functools.wraps(original)
    def swap(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager:
        before(module)
        return original(module, *args, **kwargs)

    replace(undo, stateless, "_reparametrize_module", swap, stays=True)
