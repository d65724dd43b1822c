# SPDX-License-Identifier: Apache-2.0
"""The body of a step function, traced and differentiated for one microbatch, and put into the graph of the step for
each."""

from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import func_graph

from lamina.errors import UsageError
from lamina.tensorflow import copies, graphs, random_numbers, running, taken
from lamina.tensorflow.installed import tf

_CHANGES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
_OURS = ("SMPInput", "SMPOutput")


class Body:
    """A body as a graph.

    Attributes:
        trace: what is known of it.
        results: what it returns, one after the other.
        gradients: those of them that come of gradients, by number, where there are copies of the model.
    """

    def __init__(self, function: Callable[..., Any], given: Any, pieces: Sequence[Any], wanted: frozenset[int] | None):
        """Traces it.

        Args:
            function: the body, as TensorFlow calls it.
            given: its arguments and keyword arguments.
            pieces: those of the first microbatch, one after the other.
            wanted: see `running.StepTrace`.
        """
        self.trace = trace = running.StepTrace(wanted)
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in pieces if tf.is_tensor(each)]

        def run(token: tf.Tensor, *tensors: tf.Tensor) -> Any:
            trace.graph, trace.token = tf.compat.v1.get_default_graph(), token
            rest = iter(tensors)
            arguments, keywords = tf.nest.pack_sequence_as(
                given, [next(rest) if tf.is_tensor(each) else each for each in pieces]
            )
            return function(*arguments, **keywords)

        with running.tracing(trace):
            self._graph = func_graph.func_graph_from_py_func(
                "microbatch", run, [tf.TensorSpec([], tf.float32), *specs], {}
            )
        trace.check()
        self._inputs = [tensor.name for tensor in self._graph.inputs[: 1 + len(specs)]]
        self._definition = self._defined()
        random_numbers.refuse(self._graph.as_graph_def(), "a step function")
        self.results = tf.nest.flatten(self._graph.structured_outputs)
        self.gradients = self._of_gradients()
        self._free = [node.name for node in self._definition.node if "_independent_side_effects" in node.attr]

    def _of_gradients(self) -> list[int]:
        if copies.of_job().count == 1:
            return []
        names = taken.of_gradients(self._graph, (), _refuse_changes)
        return [
            number
            for number, result in enumerate(self.results)
            if any(
                tensor.name in names for tensor in tf.nest.flatten(result, expand_composites=True) if tensor is not None
            )
        ]

    def _defined(self) -> graph_pb2.GraphDef:
        inputs = {tensor.op.name for tensor in self._graph.inputs}
        return graphs.without(self._graph.as_graph_def(), inputs)

    def put(self, microbatch: int, token: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
        """Puts it into the graph that is made. Returns what it returns, and the tensors that are there once the
        microbatch is through."""
        graph = tf.compat.v1.get_default_graph()
        for function in self._graph._functions.values():
            graph._add_function_recursive(function)
        for node in self._definition.node:
            if node.op in _OURS:
                node.attr["microbatch"].i = microbatch
        known = dict(zip(self._inputs, [token, *tensors], strict=True))
        known |= {inner.name: outer for outer, inner in self._graph.captures}
        outputs = tf.nest.flatten(self._graph.structured_outputs, expand_composites=True)
        names = [each.name for each in outputs if each is not None]
        ends = [tensor.name for tensor in self.trace.ends]
        made = graphs.put(self._definition, known, [*names, *ends, *self._free], f"microbatch_{microbatch}")
        for operation in made[len(names) + len(ends) :]:
            running.run_freely(operation)
        rest = iter(made)
        flat = []
        for each in outputs:
            flat.append(each if each is None else next(rest))
            if each is not None:
                flat[-1].set_shape(each.shape)
        structure = tf.nest.pack_sequence_as(self._graph.structured_outputs, flat, expand_composites=True)
        return structure, made[len(names) : len(names) + len(ends)]


def _refuse_changes(operation: tf.Operation) -> None:
    if operation.type.startswith(_CHANGES):
        raise UsageError(
            f"a step function changes a variable by gradients (operation {operation.name}), which are those of one "
            "copy of the model there: change it by what accumulate() gives, outside"
        )
