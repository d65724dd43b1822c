# SPDX-License-Identifier: Apache-2.0
"""The frames of a traceback that a user knows: those of the script and of what it calls, without ours between them."""

import os
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch

from lamina import errors
from lamina.errors import Error, InternalError

_OURS = os.path.dirname(errors.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Ours that stand between the script and its modules, or torch's operations.
_AROUND = tuple(os.path.join(_OURS, each) for each in ("torch_patches", "tracing"))
# Between a call of a module and its forward torch has two frames of its own, which all modules share.
_CALLS = os.path.join(_TORCH, "nn", "modules", "module.py")


def hide_ours(error: BaseException) -> None:
    """Takes frames of ours, and of torch's calls of modules, out of the tracebacks of an error and of those behind it.
    The innermost stays; all do where we, and not the script or torch, have failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = list(_frames(error.__traceback__))
        if frames and not _is_bug(error, frames):
            error.__traceback__ = _linked([each for each in frames[:-1] if not _passes(each)] + frames[-1:])
        error = error.__cause__ or error.__context__


def script_frames(error: BaseException) -> str:
    """The lines of a traceback that are neither ours nor torch's; "" for none."""
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([each for each in frames if not each.filename.startswith((_OURS, _TORCH))]))


def _is_bug(error: BaseException, frames: list[TracebackType]) -> bool:
    if isinstance(error, Error):
        return isinstance(error, InternalError)
    files = (file for file in map(_file, reversed(frames)) if not file.startswith((_TORCH, *_AROUND)))
    return next(files, _OURS).startswith(_OURS)


def _passes(frame: TracebackType) -> bool:
    return _file(frame).startswith(_OURS) or _file(frame) == _CALLS


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(frames: list[TracebackType]) -> TracebackType:
    trace = None
    for each in reversed(frames):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace
