# SPDX-License-Identifier: Apache-2.0
"""Errors of the rank's device, which end with a line of what we know: see [Note: errors of devices] in
lamina/session/device_errors.h. They get it where they leave our calls, for a script may catch them there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from lamina.errors import RemoteError

Tell = Callable[[nn.Module | None], str]


def _nothing(_: nn.Module | None) -> str:
    return ""


_of_full_memory: Tell = _nothing
_of_failed_kernel: Tell = _nothing


def tell_by(of_full_memory: Tell, of_failed_kernel: Tell) -> None:
    """Has these say the lines. They are told the module whose forward has failed, None where it was none's, and say ""
    where there is nothing to add."""
    global _of_full_memory, _of_failed_kernel
    _of_full_memory, _of_failed_kernel = of_full_memory, of_failed_kernel


def explain(error: BaseException) -> None:
    """Adds the line, once, to an error of this rank's device."""
    if isinstance(error, RemoteError) or hasattr(error, "_is_explained"):
        return
    if isinstance(error, torch.OutOfMemoryError):
        tell = _of_full_memory
    elif isinstance(error, torch.AcceleratorError):
        tell = _of_failed_kernel
    else:
        return
    error._is_explained = True
    if line := tell(_module(error.__traceback__)):
        error.args = (f"{error}\n{line}", *error.args[1:])


@contextmanager
def explained() -> Iterator[None]:
    """Explains what is raised inside."""
    try:
        yield
    except BaseException as error:
        explain(error)
        raise


def _module(trace: TracebackType | None) -> nn.Module | None:
    """The innermost module in whose forward it was raised."""
    found = None
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module):
            found = owner
        trace = trace.tb_next
    return found
