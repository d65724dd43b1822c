# SPDX-License-Identifier: Apache-2.0
"""Operations that take gradients in a graph, also through the functions that it calls."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util

from lamina.tensorflow import graphs
from lamina.tensorflow.installed import tf

_LOOPS = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")

# Functions are traced before the step function that calls them, and once: gradients are noted wherever they are taken.
_NOTED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        made = plain(*arguments, **keywords)
        for each in tf.nest.flatten(made, expand_composites=True):
            if isinstance(getattr(each, "graph", None), tf.Graph):
                _NOTED.setdefault(each.graph, set()).add(each.name)
        return made

    return call


def note() -> None:
    """Has gradients that tapes and tf.gradients take from now on be known, as long as the process. Once."""
    if not hasattr(imperative_grad.imperative_grad, "_lamina"):
        imperative_grad.imperative_grad = _noting(imperative_grad.imperative_grad)
        imperative_grad.imperative_grad._lamina = True
        gradients_util._GradientsHelper = _noting(gradients_util._GradientsHelper)


def of_gradients(graph: tf.Graph, given: Iterable[int], see: Callable[[tf.Operation], None]) -> set[str]:
    """The names of tensors of a graph that come of gradients.

    Args:
        graph: a function's.
        given: those of its inputs that do, by number.
        see: is called with each operation that reads one, also in functions that it calls.
    """
    names = set(_NOTED.get(graph, ())) | {graph.inputs[at].name for at in given}
    for operation in graph.get_operations():
        read = [at for at, tensor in enumerate(operation.inputs) if tensor.name in names]
        if read:
            see(operation)
        names |= {operation.outputs[at].name for at in _outputs(operation, read, see)}
    return names


def _outputs(operation: tf.Operation, read: list[int], see: Callable[[tf.Operation], None]) -> set[int]:
    """The outputs of an operation that come of gradients, if these of its inputs do."""
    every = set(range(len(operation.outputs)))
    found = _called(operation)
    if not found:
        return every if read else set()
    if operation.type in _CALLS:
        return _results(found[0], read, see) & every
    if operation.type in _CONDITIONALS:
        if 0 in read:
            return every
        return set().union(*(_results(branch, [at - 1 for at in read], see) for branch in found)) & every
    if operation.type in _LOOPS:
        body = operation.graph._get_function(operation.get_attr("body").name).graph
        before, after = None, set(read)
        while before != after:
            before, after = after, (after | _results(body, after, see)) & every
        return after
    return every if read or any(_NOTED.get(each) for each in found) else set()


_calling: dict[str, bool] = {}  # operations by their types


def _called(operation: tf.Operation) -> list[tf.Graph]:
    """Functions that an operation calls."""
    if operation.type not in _calling:
        _calling[operation.type] = any(each.type in ("func", "list(func)") for each in operation.op_def.attr)
    if not _calling[operation.type]:
        return []
    called = [operation.graph._get_function(each.name) for each in graphs.functions([operation.node_def])]
    return [function.graph for function in called if hasattr(function, "graph")]


def _results(graph: tf.Graph, given: Iterable[int], see: Callable[[tf.Operation], None]) -> set[int]:
    names = of_gradients(graph, [at for at in given if at < len(graph.inputs)], see)
    return {at for at, tensor in enumerate(graph.outputs) if tensor.name in names}
