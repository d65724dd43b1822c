# SPDX-License-Identifier: Apache-2.0
"""A model's `call` as a graph of operations, for one microbatch."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorflow.core.framework import attr_value_pb2, node_def_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph

from lamina import _lamina
from lamina.errors import UsageError
from lamina.tensorflow import graphs
from lamina.tensorflow.conversion import converted
from lamina.tensorflow.installed import keras, tf
from lamina.tensorflow.own_gradients import ATTRIBUTE, OwnGradient, traced_apart

_LAYER = "_lamina_layer"
_PARTITION = "_lamina_partition"
STAYS = (tf.resource, tf.variant, tf.string)  # types of which tensors stay on their rank
_READS = ("ReadVariableOp", "VarIsInitializedOp", "VariableShape")


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the operations that are made inside on a partition, where `auto_partition` is off; else it is ignored. Of
    nested contexts the innermost counts; what is in none goes to `default_partition`.

    Args:
        index: the partition, below `partitions`.
    """
    with tf.compat.v1.get_default_graph()._attr_scope({_PARTITION: attr_value_pb2.AttrValue(i=index)}):
        yield


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Leaves graphs that are made, as `tf.init_scope` does. That stops all tapes of the thread, where those of what is
    traced are to record. It keeps the function that is traced as the maker of variables, too, which would have
    TensorFlow trace it again: here variables are made as outside of functions."""
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        makers, graph._variable_creator_stack = graph._variable_creator_stack, []
        stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            graph._variable_creator_stack = makers
            if stopped:
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()


@contextlib.contextmanager
def _labels(model: keras.Model) -> Iterator[None]:
    """Has operations carry the innermost layer that they are of. The model itself is none."""
    plain = keras.layers.Layer.__call__

    def labelled(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> Any:
        if layer is model:
            return plain(layer, *arguments, **keywords)
        label = (getattr(layer, "path", None) or layer.name).encode()
        with tf.compat.v1.get_default_graph()._attr_scope({_LAYER: attr_value_pb2.AttrValue(s=label)}):
            return plain(layer, *arguments, **keywords)

    keras.layers.Layer.__call__ = labelled
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = plain


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    """Has functions of TensorFlow's become part of the graph that calls them, so that a cut may go through them."""
    plain = polymorphic_function.Function.__call__

    def inlined(function: Any, *arguments: Any, **keywords: Any) -> Any:
        return converted(function.python_function, function._autograph)(*arguments, **keywords)

    polymorphic_function.Function.__call__ = inlined
    try:
        yield
    finally:
        polymorphic_function.Function.__call__ = plain


def _attribute(operation: tf.Operation, name: str, default: Any) -> Any:
    try:
        return operation.get_attr(name)
    except ValueError:
        return default


@dataclass
class Call:
    """A traced call.

    Attributes:
        graph: the function's graph.
        inputs: the names of the tensors that are the model's arguments.
        operations: those that count, in their order: constants are copied to where they are read.
        results: the tensors that the call returns.
        structure: what it returns, with tensors in the places of `results`.
        known: the model's variables.
        variables: those that it uses: the name of the tensor that is one's handle, and its number in `known`.
        constants: operations in the place of eager tensors that it reads, by the tensors' names.
        own_gradients: of operations that have one, and of those in functions that they call, by their names.
    """

    graph: func_graph.FuncGraph
    inputs: list[str]
    operations: list[tf.Operation]
    results: list[tf.Tensor]
    structure: Any
    known: list[tf.Variable]
    variables: dict[str, int]
    constants: dict[str, node_def_pb2.NodeDef]
    own_gradients: dict[str, list[OwnGradient]]
    _differentiable: dict[frozenset[int] | None, set[str]] = field(default_factory=dict)

    def __post_init__(self):
        self.number = {operation.name: at for at, operation in enumerate(self.operations)}
        # Gradients of loops and conditionals, which `differentiable` takes, change the operation: it is as it was.
        self.outputs = {operation.name: list(operation.outputs) for operation in self.operations}
        self._inputs = {operation.name: list(operation.inputs) for operation in self.operations}
        self.definition = self.graph.as_graph_def()
        self.nodes = {node.name: node for node in self.definition.node}

    def computed(self) -> list[tuple[int, int]]:
        """The results that operations make; others are arguments, or constants."""
        return [(self.number[each.op.name], each.value_index) for each in self.results if each.op.name in self.number]

    def differentiable(self, wanted: frozenset[int] | None) -> set[str]:
        """The names of outputs by which results have gradients: those of these numbers, or all of them."""
        if wanted not in self._differentiable:
            chosen = range(len(self.results)) if wanted is None else sorted(wanted)
            self._differentiable[wanted] = _differentiable(
                self.graph, self.outputs, [self.results[at] for at in chosen]
            )
        return self._differentiable[wanted]

    def constant(self, tensor: tf.Tensor) -> node_def_pb2.NodeDef | None:
        """The operation that makes it, where that is a constant."""
        return tensor.op.node_def if tensor.op.type == "Const" else self.constants.get(tensor.name)

    def watched(self) -> set[int]:
        """The results that have gradients, by number."""
        names = self.differentiable(None)
        return {at for at, tensor in enumerate(self.results) if tensor.name in names}

    def _read_by_gradient(self, operation: tf.Operation) -> list[tf.Tensor]:
        names = [name for own in self.own_gradients.get(operation.name, ()) for name in _read_beside(own)]
        return [self.graph.get_tensor_by_name(name) for name in names]

    def read(self, operation: tf.Operation) -> list[tf.Tensor]:
        """The tensors that the operation, or a gradient of its own, reads."""
        return [*self._inputs[operation.name], *self._read_by_gradient(operation)]

    def sources(self, operation: tf.Operation) -> list[tuple[int, int]]:
        """The outputs of operations that it reads."""
        return [
            (self.number[tensor.op.name], tensor.value_index)
            for tensor in self.read(operation)
            if tensor.op.name in self.number
        ]

    def used(self, operation: tf.Operation) -> list[int]:
        """The variables that it uses, by number."""
        used = [self.variables[tensor.name] for tensor in self.read(operation) if tensor.name in self.variables]
        used += [number for own in self.own_gradients.get(operation.name, ()) for number in own.variables.values()]
        return list(dict.fromkeys(used))

    def after(self, operation: tf.Operation) -> list[int]:
        """The operations that are over before it without its reading them."""
        return [self.number[each.name] for each in operation.control_inputs if each.name in self.number]

    def to_place(self, by_hand: bool, owners: dict[int, int]) -> list[_lamina.GraphOperation]:
        """The operations as the engine places them. `owners` are partitions of variables that have one already."""
        return [self._row(operation, by_hand, owners) for operation in self.operations]

    def _row(self, operation: tf.Operation, by_hand: bool, owners: dict[int, int]) -> _lamina.GraphOperation:
        variables = self.used(operation)
        placed = next((owners[one] for one in variables if one in owners), None)
        if placed is None and by_hand:
            placed = _attribute(operation, _PARTITION, None)
        kept = [each.op.name for each in self.read(operation) if each.dtype in STAYS]
        colocated = [name.decode().removeprefix("loc:@") for name in _attribute(operation, "_class", [])]
        return _lamina.GraphOperation(
            name=operation.name,
            inputs=self.sources(operation),
            variables=variables,
            layer=_attribute(operation, _LAYER, b"").decode(),
            together=[self.number[name] for name in [*colocated, *kept] if name in self.number],
            placed_at=placed,
            output_bytes=[_size_bytes(tensor) for tensor in self.outputs[operation.name]],
        )


def _size_bytes(tensor: tf.Tensor) -> int:
    """Its bytes; of a size that is not known, as that of samples, for each."""
    if tensor.dtype in STAYS or tensor.shape.rank is None:
        return 0
    return math.prod(1 if size is None else size for size in tensor.shape) * tensor.dtype.size


def trace(
    model: keras.Model,
    call: Callable[..., Any],
    specs: list[tf.TensorSpec],
    variables: Callable[[], list[tf.Variable]],
) -> Call:
    """Traces a call, in which the model makes its variables if it has not. In `lifted()`.

    Args:
        model: whose call it is.
        call: takes tensors of these specs.
        variables: gives all of the model's.
    """
    with _labels(model), _inlined():
        graph = func_graph.func_graph_from_py_func("call", call, specs, {})
    count = len(specs)
    inputs = [tensor.name for tensor in graph.inputs[:count]]
    known = variables()
    handles = {id(variable.handle): at for at, variable in enumerate(known)}
    used, constants = {}, {}
    for outside, inside in graph.captures:
        number = handles.get(id(outside))
        constant = graphs.constant(inside.op.name, outside) if number is None else None
        if constant is not None:
            constants[inside.name] = constant
            continue
        if number is None:
            raise UsageError(
                f"the model's call reads {outside.name if hasattr(outside, 'name') else outside}, which is none of its "
                "variables and no argument: pass it as an argument"
            )
        used[inside.name] = number
    results = [_returned(tensor) for tensor in graph.outputs]
    operations = _living(graph, results)
    numbers = handles | {id(tensor): used[tensor.name] for tensor in graph.inputs if tensor.name in used}
    own_gradients = _own_gradients(graph, operations, lambda tensor: numbers.get(id(tensor)))
    living = {operation.name for operation in operations}
    names = [name for each in own_gradients.values() for own in each for name in _read_beside(own)]
    read = [graph.get_tensor_by_name(name) for name in names]
    if any(tensor.op.name not in living for tensor in read):  # its gradient alone needs them
        operations = _living(graph, [*results, *read])
    return Call(graph, inputs, operations, results, graph.structured_outputs, known, used, constants, own_gradients)


def _own_gradients(
    graph: func_graph.FuncGraph, operations: list[tf.Operation], number_of: Callable[[tf.Tensor], int | None]
) -> dict[str, list[OwnGradient]]:
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    of_functions: dict[str, list[OwnGradient]] = {}
    found = {}
    for operation in operations:
        own = [traced_apart(operation, number_of)] if _attribute(operation, ATTRIBUTE, None) else []
        for name, function in graphs.called([nodes[operation.name]], definition.library).items():
            if name not in of_functions:
                inside = graph._get_function(name).graph
                having = [
                    inside.get_operation_by_name(each.name) for each in function.node_def if ATTRIBUTE in each.attr
                ]
                of_functions[name] = [traced_apart(each, number_of, name) for each in having]
            own += of_functions[name]
        if own:
            found[operation.name] = own
    return found


def _read_beside(own: OwnGradient) -> list[str]:
    """The names of tensors of the model's own graph that it reads."""
    return [] if own.function else list(own.reads.values())


def _returned(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor behind the identity that TensorFlow puts behind results."""
    return tensor.op.inputs[0] if tensor.op.type == "Identity" and tensor.op.control_inputs else tensor


def _living(graph: func_graph.FuncGraph, results: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """The operations that results depend on, and those that change state, with what they depend on."""
    ours = set(graph.get_operations())
    todo = [tensor.op for tensor in results]
    todo += [operation for operation in graph.control_outputs if operation.type not in _READS]
    living = set()
    while todo:
        operation = todo.pop()
        if operation in living or operation not in ours:
            continue
        living.add(operation)
        todo += [tensor.op for tensor in operation.inputs]
        todo += operation.control_inputs
    return [each for each in graph.get_operations() if each in living and each.type not in ("Placeholder", "Const")]


def _differentiable(
    graph: func_graph.FuncGraph, made: dict[str, list[tf.Tensor]], results: list[tf.Tensor]
) -> set[str]:
    """The names of the outputs by which the results have gradients."""
    targets = [tensor for tensor in results if graphs.has_gradients(tensor)]
    outputs = [tensor for each in made.values() for tensor in each if graphs.has_gradients(tensor)]
    if not targets or not outputs:
        return set()
    with graph.as_default():
        targets = [tf.math.real(tensor) if tensor.dtype.is_complex else tensor for tensor in targets]
        gradients = tf.gradients(targets, outputs)
    return {tensor.name for tensor, gradient in zip(outputs, gradients, strict=True) if gradient is not None}
