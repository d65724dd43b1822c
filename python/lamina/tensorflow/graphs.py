# SPDX-License-Identifier: Apache-2.0
"""Graphs as they travel, put into one that is made."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2
from tensorflow.python.eager import context

from lamina.tensorflow.installed import tf


def has_gradients(tensor: tf.Tensor) -> bool:
    """Tensors of its type have them."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def without(definition: graph_pb2.GraphDef, names: set[str]) -> graph_pb2.GraphDef:
    """A copy without the operations of these names, and without functions."""
    kept = graph_pb2.GraphDef(versions=definition.versions)
    kept.node.extend(node for node in definition.node if node.name not in names)
    for node in kept.node:
        inputs = [each for each in node.input if not (each.startswith("^") and each[1:] in names)]
        del node.input[:]
        node.input.extend(inputs)
    return kept


def functions(nodes: Iterable[node_def_pb2.NodeDef]) -> Iterator[attr_value_pb2.NameAttrList]:
    """Places where operations name functions that they call."""
    for node in nodes:
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                yield attribute.func
            yield from attribute.list.func


def called(
    nodes: Iterable[node_def_pb2.NodeDef], library: function_pb2.FunctionDefLibrary
) -> dict[str, function_pb2.FunctionDef]:
    """Functions of a library that operations call, those that these call too, by name."""
    known = {function.signature.name: function for function in library.function}
    todo = [function.name for function in functions(nodes)]
    found: dict[str, function_pb2.FunctionDef] = {}
    while todo:
        name = todo.pop()
        if name in found or name not in known:
            continue
        found[name] = known[name]
        todo += [function.name for function in functions(known[name].node_def)]
    return found


def take_functions(definition: graph_pb2.GraphDef, library: function_pb2.FunctionDefLibrary, suffix: str) -> None:
    """Gives a definition those functions of a library that it calls, by names of their own: TensorFlow derives names
    of further functions from them, and keeps all of them for the process."""
    taken = called(definition.node, library)
    definition.library.function.extend(taken.values())
    for function in definition.library.function:
        function.signature.name += suffix
        _rename(function.node_def, taken, suffix)
    _rename(definition.node, taken, suffix)


def _rename(nodes: Iterable[node_def_pb2.NodeDef], taken: Container[str], suffix: str) -> None:
    for function in functions(nodes):
        if function.name in taken:
            function.name += suffix


def constant(name: str, tensor: tf.Tensor) -> node_def_pb2.NodeDef | None:
    """An eager tensor as an operation of that name; None where it is a resource, or none that is eager."""
    if not hasattr(tensor, "numpy") or tensor.dtype in (tf.resource, tf.variant):
        return None
    with tf.Graph().as_default():
        return tf.constant(tensor.numpy(), tensor.dtype, name=name).op.node_def


def put(
    definition: graph_pb2.GraphDef, known: Mapping[str, tf.Tensor], wanted: Sequence[str], name: str = ""
) -> list[Any]:
    """Puts its operations into the graph that is made.

    Args:
        definition: lacks some of what its operations read.
        known: tensors of this graph, or ones that it captures, by the names that the definition has for them.
        wanted: names of tensors and operations in the definition.
        name: stands before the names of its operations.

    Returns:
        What is wanted, in this graph.
    """
    graph = tf.compat.v1.get_default_graph()
    read = {source if ":" in source else f"{source}:0" for node in definition.node for source in node.input}
    given = {each: graph.capture(tensor) for each, tensor in known.items() if each in read}
    # The definition lacks what is wanted and known.
    inside = [each for each in wanted if each not in known]
    made = iter(tf.graph_util.import_graph_def(definition, input_map=given, return_elements=inside, name=name) or ())
    for function in definition.library.function:  # the import makes them known to the graph alone
        if not context.context().has_function(function.signature.name):
            context.context().add_function_def(function)
    return [graph.capture(known[each]) if each in known else next(made) for each in wanted]
