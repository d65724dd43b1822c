# SPDX-License-Identifier: Apache-2.0
"""torch.compile of sliced layers: compiled code has their slices as they compute with them.

A compiled graph takes parameters as its arguments, and its kernels are not all operations that a guarded slice sees. So
who takes a slice is judged by the graph: layers do by `lamina.tp_own`.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lamina import _lamina
from lamina.util.settings import replace


def install(undo: ExitStack) -> None:
    """Until `undo` is closed, compiled functions are called with slices of the layers that they have compiled. Takes
    effect when torch's compiler is there, whose import takes seconds."""
    if "torch._dynamo.output_graph" in sys.modules:
        _install(undo)
        return

    @functools.wraps(torch.compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        if not installed and "torch._dynamo.output_graph" in sys.modules:
            installed.append(True)
            _install(undo)
        return compiled

    original, installed = torch.compile, []
    replace(undo, torch, "compile", compile)


def _install(undo: ExitStack) -> None:
    graph = torch._dynamo.output_graph.OutputGraph
    replace(undo, graph, "call_user_compiler", _with_slices(graph.call_user_compiler))


def _with_slices(original: Callable) -> Callable:
    """Runs for the compiler, which has a graph."""

    @functools.wraps(original)
    def call_user_compiler(self: Any, graph: torch.fx.GraphModule, *rest: Any) -> Callable:
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        read = [any(not str(user.target).startswith("lamina.tp_own") for user in node.users) for node in places]
        compiled = original(self, graph, *rest)

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            given = list(args)
            for index, each in enumerate(args):
                if isinstance(each, torch.Tensor) and _lamina.name_guarded(each):
                    if read[index]:
                        _lamina.require_whole(each, "torch.compile")
                    given[index] = torch.ops.lamina.tp_own(each)
            return compiled(*given)

        return run

    return call_user_compiler
