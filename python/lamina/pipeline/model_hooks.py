# SPDX-License-Identifier: Apache-2.0
"""Hooks that a script registers of its model, besides torch's."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina.errors import UsageError
from lamina.job import current

Hook = Callable[[Any, torch.optim.Optimizer | None], Any]


class ModelHooks:
    """The hooks of one moment in the life of a model, each called once, with the model and the latest optimizer."""

    def __init__(self):
        self._hooks: dict[int, Hook] = OrderedDict()

    def add(self, model: nn.Module, hook: Hook, at_once: bool = False) -> RemovableHandle:
        """Keeps a hook, until its handle removes it; or calls it `at_once`, where the moment is over."""
        if not callable(hook):
            raise UsageError(f"a hook is called with the model and the optimizer; {type(hook).__name__} cannot be")
        handle = RemovableHandle(self._hooks)
        if at_once:
            _call(model, hook)
        else:
            self._hooks[handle.id] = hook
        return handle

    def run(self, model: nn.Module) -> None:
        """Calls them, in the order in which they were added, and forgets them."""
        hooks = list(self._hooks.values())
        self._hooks.clear()
        for hook in hooks:
            _call(model, hook)


def _call(model: nn.Module, hook: Hook) -> None:
    optimizers = current.job().optimizers
    hook(model, optimizers[-1].optimizer if optimizers else None)
