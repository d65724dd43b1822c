# SPDX-License-Identifier: Apache-2.0
"""Gradients of slices that a script is given by autograd: guarded, as slices are (lamina/value/guarded.h).

`.grad` of a slice is guarded where a script reads it, by `foreign.watch_slices`.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.util.settings import replace


def install(undo: ExitStack) -> None:
    """Until `undo` is closed, what hooks of slices and `torch.autograd.grad` are given is guarded."""
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        replace(undo, nn.Parameter, name, _judged(getattr(nn.Parameter, name)))
    original = torch.autograd._engine_run_backward

    @functools.wraps(original)
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(tensors, *args, **kwargs)
        inputs = args[3] if len(args) > 3 else ()  # torch gives what is asked for in the fifth place
        for gradient, of in zip(found or (), inputs, strict=False):
            if isinstance(gradient, torch.Tensor) and isinstance(of, torch.Tensor):
                _lamina.guard_gradient(gradient, of)
        return found

    replace(undo, torch.autograd, "_engine_run_backward", run, stays=True)


def _judged(register: Callable) -> Callable:
    """Registers hooks of slices so that what they do in a backward is judged."""

    @functools.wraps(register)
    def registered(parameter: nn.Parameter, hook: Callable) -> Any:
        if not _lamina.name_guarded(parameter):
            return register(parameter, hook)

        @functools.wraps(hook)
        def judged(given: torch.Tensor) -> Any:
            with _lamina.Judged():
                if given is not parameter:
                    given = given.view_as(given)  # autograd goes on with its own
                    _lamina.guard_gradient(given, parameter)
                return hook(given)

        return register(parameter, judged)

    return registered
