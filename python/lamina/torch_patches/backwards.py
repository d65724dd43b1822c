# SPDX-License-Identifier: Apache-2.0
"""Backwards that a script begins by torch's functions."""

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from lamina.util.settings import replace


def install(see: Callable[[Iterable[torch.Tensor]], None], undo: ExitStack) -> None:
    """Until `undo` is closed, `see` is called with the tensors of each before it begins."""
    original = torch.autograd._engine_run_backward

    @functools.wraps(original)
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        see(tensors)
        return original(tensors, *args, **kwargs)

    replace(undo, torch.autograd, "_engine_run_backward", run, stays=True)
