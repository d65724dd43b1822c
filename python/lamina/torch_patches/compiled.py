# SPDX-License-Identifier: Apache-2.0
"""torch.compile in steps: what compiled code reads has its value before the compiler looks at it.

A reference is to the compiler another kind of tensor than its value, so that each one would be compiled for anew. The
compiler also holds a lock while it works, in which nobody may wait for another rank.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError
from lamina.util import pytree
from lamina.util.settings import replace

_ENGINE = torch._C._dynamo.eval_frame


def install(undo: ExitStack, references: bool, shards: bool) -> bool:
    """Until `undo` is closed, compiled functions and modules are called with values where there are references, and
    the compiler sees no gradients of shards. Does nothing until torch's compiler has been imported, which takes
    seconds; returns whether it was."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return False
    if references:
        _replace(torch._dynamo.eval_frame, "_callback_from_stance", _before_a_call, undo)
        _replace(torch._dynamo.convert_frame.CatchErrorsWrapper, "__call__", _before_the_lock, undo)
    for reader in (torch._subclasses.meta_utils, torch._dynamo.variables.builder) if shards else ():
        _replace(reader, "safe_grad", _without_shards, undo)
    return True


def refuse_graphs(what: str, settings: Any) -> None:
    """Raises UsageError where `what` was compiled to be replayed as a graph of the rank's accelerator. Each replay
    writes to the memory of the one before, whose results other microbatches and ranks are still to read.

    Args:
        what: a module or a function, for messages.
        settings: those that torch's compiler has for it; None for those of another backend.
    """
    is_graph = isinstance(settings, dict) and settings.get("triton.cudagraphs", False)
    if is_graph and _lamina.rank_device().type != "cpu":
        raise UsageError(
            f"{what} was compiled into graphs of the device, as the modes reduce-overhead and max-autotune of "
            "torch.compile do: a replay overwrites what the one before gave, which other microbatches and ranks of a "
            'pipeline have still to read. Compile it with the default mode, or mode="max-autotune-no-cudagraphs"',
            code="model-graphs",
        )


def outside(function: Callable) -> Callable:
    """`function` as compiled code may call it: it is left there, and what `function` returned is waited for."""

    def call(*args: Any) -> Any:
        compiling = _ENGINE.set_eval_frame(None)
        try:
            result = function(*args)
            return result if compiling is None else _fetched(result)
        finally:
            _ENGINE.set_eval_frame(compiling)

    return left_alone(call)


def left_alone(function: Callable) -> Callable:
    """`function`, which the compiler leaves alone: compiled code ends before a call of it and begins anew after it.
    What it calls is compiled as ever."""
    function._torchdynamo_disable = True
    action = _ENGINE._FrameAction
    _ENGINE.set_code_exec_strategy(function.__code__, _ENGINE._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function


def _before_a_call(original: Callable) -> Callable:
    """Runs for a compiled function, whose wrapper asks `original` what to do with it."""

    def callback(given: Any) -> Any:
        wrapper = sys._getframe(1).f_locals
        if _lamina.in_step():
            name = getattr(wrapper.get("fn"), "__qualname__", "a function")
            refuse_graphs(name, getattr(wrapper.get("self"), "compiler_config", None))
        _fetched((wrapper.get("args"), wrapper.get("kwargs")))
        return original(given)

    return callback


def _before_the_lock(original: Callable) -> Callable:
    """Runs for the compiler, which was called for a frame that fits nothing that is compiled."""

    def compile_frame(self: Any, frame: Any, *rest: Any) -> Any:
        _fetched(list(frame.f_locals.values()))
        return original(self, frame, *rest)

    return compile_frame


def _without_shards(original: Callable) -> Callable:
    """Runs for the compiler, which takes a gradient to be like its parameter."""

    def safe_grad(tensor: torch.Tensor) -> torch.Tensor | None:
        gradient = original(tensor)
        return None if gradient is None or gradient.shape != tensor.shape else gradient

    return safe_grad


def _replace(where: Any, name: str, wrap: Callable, undo: ExitStack) -> None:
    original = getattr(where, name)
    replace(undo, where, name, functools.wraps(original)(wrap(original)))


def _fetched(tree: Any) -> Any:
    """`tree`, whose references have become their values."""
    for tensor in pytree.tensors(tree):
        _lamina.materialise(tensor)
    return tree
