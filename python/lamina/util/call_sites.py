# SPDX-License-Identifier: Apache-2.0
"""Which call of the user's program this thread is in, as messages name it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_LAMINA = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (_LAMINA, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, contextlib.__file__)

# Methods by what they are called in a training loop, and functions that stand in for torch's.
_OWNERS = {
    "DistributedModel.": "model.",
    "OptimizerState.install.<locals>.": "optimizer.",
    "OptimizerState.": "optimizer.",
    "ProcessGroups.": "lamina.",
}
_STAND_INS = {
    "_call": "model",
    "_clip": "torch.nn.utils.clip_grad_norm_",
    "_total_norm": "torch.nn.utils.get_total_norm",
    "PlainOptimizers.before_step": "optimizer.step",
}
_SHARED = frozenset({"gathered", "require_same"})  # parts of several calls: of which one, its caller says


def name_call() -> tuple[str, str, str]:
    """The public function of ours, or of torch's, that the user's code has called, where, and the line of ours that is
    executed."""
    frames = list(_of_libraries(sys._getframe().f_back))
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(_LAMINA)]
    if not frames:
        return "", "", ""
    if not ours:  # what a backward does at its end
        return f"{frames[-1].f_code.co_name}()", _place(frames[-1].f_back), ""
    part = next((frame for frame in ours if frame.f_code.co_name not in _SHARED), ours[0])
    file = part.f_code.co_filename.removeprefix(_LAMINA)
    return _public_name(ours[-1]), _place(frames[-1].f_back), f"{file}:{part.f_lineno}"


def where() -> str:
    """The place in the user's code that has called us: "train.py:12"."""
    frames = list(_of_libraries(sys._getframe().f_back))
    return _place(frames[-1].f_back) if frames else ""


def place_of_script() -> str:
    """The place in code of nobody's library that this thread is in; "" where there is none."""
    frame: FrameType | None = sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return _place(frame)


def place_of_error(error: BaseException) -> str:
    """The innermost place in code of nobody's library that an error has come through."""
    found, at = "", error.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            file = at.tb_frame.f_code.co_filename
            found = f"{file.removeprefix(os.getcwd() + os.sep)}:{at.tb_lineno}"
        at = at.tb_next
    return found


def _of_libraries(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, up to the user's code."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"


def _public_name(frame: FrameType) -> str:
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # the former since Python 3.11
    step = getattr(frame.f_locals.get("self"), "name", None)
    if name.startswith("StepFunction.") and step is not None:
        return f"the step function {step}"
    if name in _STAND_INS:
        return f"{_STAND_INS[name]}()"
    for owner, public in _OWNERS.items():
        if name.startswith(owner):
            return f"{public}{name.rpartition('.')[2]}()"
    package = "lamina.dist" if frame.f_code.co_filename.startswith(os.path.join(_LAMINA, "dist")) else "lamina"
    return f"{package}.{name}()"
