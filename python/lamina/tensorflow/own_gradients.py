# SPDX-License-Identifier: Apache-2.0
"""Gradients of one's own (tf.custom_gradient, as tf.nn.silu and tf.recompute_grad have them). Each is a function of
Python over tensors of the graph in which it was traced: it is traced apart, and travels as a graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import func_graph, ops

from lamina.errors import UsageError
from lamina.tensorflow import graphs
from lamina.tensorflow.installed import tf

ATTRIBUTE = "_gradient_op_type"


@dataclass
class OwnGradient:
    """The gradient of an operation.

    Attributes:
        operation: its name.
        function: of a loop or a conditional that has the operation; "" in the model's own graph.
        definition: a serialised GraphDef.
        arguments: per output of the operation: the tensor that is its gradient, None where it has none.
        reads: tensors in the definition, and those beside the operation in their place; arguments of the function by
            their numbers.
        variables: tensors in the definition that are handles, and the variables' numbers.
        results: per input of the operation: its gradient, the parts of one that is IndexedSlices, or None.
    """

    operation: str
    function: str
    definition: bytes
    arguments: list[str | None]
    reads: dict[str, str | int]
    variables: dict[str, int]
    results: list[str | list[str] | None]

    def register(self, tensor_of: Callable[[tf.Graph, str | int], tf.Tensor], variables: dict[int, tf.Tensor]) -> str:
        """Makes it known to TensorFlow for a graph that has the operation.

        Args:
            tensor_of: the tensor in the operation's graph that is in the place of the traced one.
            variables: handles there, by number.

        Returns:
            Its name.
        """
        name = f"lamina_gradient_{ops.uid()}"
        definition = graph_pb2.GraphDef.FromString(self.definition)

        @ops.RegisterGradient(name)
        def _gradient(operation: tf.Operation, *upstream: Any) -> list[Any]:
            known = {
                argument: tf.convert_to_tensor(each)
                for argument, each in zip(self.arguments, upstream, strict=True)
                if argument is not None
            }
            known |= {inner: tensor_of(operation.graph, outer) for inner, outer in self.reads.items()}
            known |= {inner: variables[number] for inner, number in self.variables.items()}
            flat = tf.nest.flatten([each for each in self.results if each is not None])
            made = iter(graphs.put(definition, known, flat, "own_gradient"))
            return [_gradient_from(each, made) for each in self.results]

        return name


def _gradient_from(names: str | list[str] | None, made: Any) -> Any:
    if names is None:
        return None
    if isinstance(names, str):
        return next(made)
    values, indices, *shape = [next(made) for _ in names]
    return tf.IndexedSlices(values, indices, *shape)


def tensor_in_function(graph: tf.Graph, name: str | int) -> tf.Tensor:
    """The tensor that a gradient of an operation in a function reads."""
    return graph.inputs[name] if isinstance(name, int) else graph.get_tensor_by_name(name)


def traced_apart(
    operation: tf.Operation, number_of: Callable[[tf.Tensor], int | None], function: str = ""
) -> OwnGradient:
    """Traces it.

    Args:
        operation: has one.
        number_of: the number of the variable whose handle a tensor is; None for others.
        function: see `OwnGradient`.
    """
    graph = func_graph.FuncGraph("own_gradient")
    gradient = ops.gradient_registry.lookup(operation.get_attr(ATTRIBUTE).decode())
    with operation.graph.as_default(), graph.as_default():
        upstream = [
            tf.compat.v1.placeholder(each.dtype, each.shape) if graphs.has_gradients(each) else None
            for each in operation.outputs
        ]
        gradients = gradient(operation, *upstream)
        gradients = list(gradients) if isinstance(gradients, (list, tuple)) else [gradients]
        gradients = [_kept(each) for each in gradients]
    reads, variables, constants = {}, {}, []
    known = {id(outer): inner for outer, inner in operation.graph.captures} if function else {}
    arguments = {id(tensor): at for at, tensor in enumerate(operation.graph.inputs)} if function else {}
    for outer, inner in graph.captures:
        outer = known.get(id(outer), outer)
        number = number_of(outer)
        if number is not None:
            variables[inner.name] = number
        elif getattr(outer, "graph", None) is operation.graph:
            reads[inner.name] = arguments.get(id(outer), outer.name)
        elif (constant := graphs.constant(inner.op.name, outer)) is not None:
            constants.append(constant)
        else:
            raise UsageError(
                f"the gradient of operation {operation.name} of the model reads a tensor from outside of "
                f"{'the loop or the conditional that has it' if function else 'the call of the model'}: pass it as an "
                "argument"
            )
    inputs = {tensor.op.name for _, tensor in graph.captures} | {each.op.name for each in upstream if each is not None}
    whole = graph.as_graph_def()
    definition = graphs.without(whole, inputs)
    definition.node.extend(constants)
    graphs.take_functions(definition, whole.library, "_of_gradient")
    return OwnGradient(
        operation.name,
        function,
        definition.SerializeToString(),
        [None if each is None else each.name for each in upstream],
        reads,
        variables,
        [_names(each) for each in gradients],
    )


def _kept(gradient: Any) -> Any:
    """It as tensors of the graph that is traced, even where it is one that came in."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(*(None if each is None else tf.identity(each) for each in _parts(gradient)))
    return tf.identity(gradient)


def _parts(gradient: tf.IndexedSlices) -> tuple[Any, ...]:
    return gradient.values, gradient.indices, gradient.dense_shape


def _names(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return [each.name for each in _parts(gradient) if each is not None]
    return None if gradient is None else gradient.name
