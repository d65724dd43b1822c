# SPDX-License-Identifier: Apache-2.0
"""A traced call, divided among ranks: subgraphs as they travel, and as a rank imports them."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

from lamina.errors import UsageError
from lamina.tensorflow import graphs
from lamina.tensorflow.installed import tf
from lamina.tensorflow.own_gradients import ATTRIBUTE, OwnGradient, tensor_in_function
from lamina.tensorflow.traced import STAYS, Call

_KEEPS = "has a tensor of type {}, which cannot go from one segment of the cut model to another"


@dataclass
class Passage:
    """A value that goes between two ranks: the name of its tensor, its type and shape, and whether its gradient comes
    back."""

    name: str
    dtype: str
    shape: list[int | None]
    gradient: bool


@dataclass
class Subgraph:
    """A segment of one rank.

    Attributes:
        definition: its operations, a serialised GraphDef.
        arguments: names of the tensors that it reads: arguments of the model, and outputs of other segments.
        outputs: names of its tensors that are read outside.
        stopped: those of them through which no gradient goes.
        own_gradients: of its operations.
        variables: names of handles, and the variables' numbers.
        receives, sends: its values that go between ranks.
    """

    definition: bytes = b""
    arguments: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)
    own_gradients: list[OwnGradient] = field(default_factory=list)
    receives: list[Passage] = field(default_factory=list)
    sends: list[Passage] = field(default_factory=list)


class Divided:
    """A call whose operations have partitions, in segments. `wanted` are the results whose gradients are taken."""

    def __init__(
        self, call: Call, wanted: frozenset[int] | None, segments: Sequence[tuple], crossings: Sequence[tuple]
    ):
        self.call = call
        self._differentiable = call.differentiable(wanted)
        self.segments = segments
        self.crossings = crossings
        self._segment_of = {
            call.operations[operation].name: at for at, (_, _, members) in enumerate(segments) for operation in members
        }
        self._readers: dict[str, set[int]] = defaultdict(set)  # segments, by the names of tensors
        for operation in call.operations:
            for tensor in call.read(operation):
                self._readers[tensor.name].add(self._segment_of[operation.name])

    def of(self, partition: int) -> list[Subgraph]:
        """The subgraphs of a partition; the last one is what follows the model, without operations."""
        return [self._subgraph(at) for at, (owner, _, _) in enumerate(self.segments) if owner == partition]

    def _subgraph(self, at: int) -> Subgraph:
        subgraph = Subgraph()
        for operation, output, maker, reader, gradient in self.crossings:
            tensor = self.call.outputs[self.call.operations[operation].name][output]
            shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
            if tensor.dtype in STAYS:
                raise UsageError(f"operation {tensor.op.name} of the model {_KEEPS.format(tensor.dtype.name)}")
            passage = Passage(tensor.name, tensor.dtype.name, shape, gradient)
            if maker == at:
                subgraph.sends.append(passage)
            if reader == at:
                subgraph.receives.append(passage)
        members = [self.call.operations[operation] for operation in self.segments[at][2]]
        if members:
            self._define(subgraph, members)
        return subgraph

    def _define(self, subgraph: Subgraph, members: list[tf.Operation]) -> None:
        definition = graph_pb2.GraphDef()
        names = {member.name for member in members}
        constants: dict[str, node_def_pb2.NodeDef] = {}
        for member in members:
            for own in self.call.own_gradients.get(member.name, ()):
                if own not in subgraph.own_gradients:
                    subgraph.own_gradients.append(own)
                for number in own.variables.values():
                    handles = [name for name, each in self.call.variables.items() if each == number]
                    subgraph.variables[handles[0] if handles else f"variable_{number}:0"] = number
            for tensor in self.call.read(member):
                constant = self.call.constant(tensor)
                if constant is not None:
                    constants[tensor.op.name] = constant
                elif tensor.name in self.call.variables:
                    subgraph.variables[tensor.name] = self.call.variables[tensor.name]
                elif tensor.op.name not in names and tensor.name not in subgraph.arguments:
                    if tensor.dtype in (tf.resource, tf.variant):
                        raise UsageError(f"operation {member.name} of the model {_KEEPS.format(tensor.dtype.name)}")
                    subgraph.arguments.append(tensor.name)
        for operation in [*constants.values(), *(self.call.nodes[member.name] for member in members)]:
            node = definition.node.add()
            node.CopyFrom(operation)
            kept = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            del node.input[:]
            node.input.extend(kept)
            node.attr.pop("_class", None)
        definition.versions.CopyFrom(self.call.definition.versions)
        suffix = f"_{ops.uid()}"
        graphs.take_functions(definition, self.call.definition.library, suffix)
        subgraph.own_gradients = [
            dataclasses.replace(own, function=own.function + suffix) if own.function else own
            for own in subgraph.own_gradients
        ]
        subgraph.definition = definition.SerializeToString()
        subgraph.outputs = self._read_outside(members)
        subgraph.stopped = [name for name in subgraph.outputs if name not in self._differentiable]

    def _read_outside(self, members: list[tf.Operation]) -> list[str]:
        results = {tensor.name for tensor in self.call.results}
        names = []
        for member in members:
            own = self._segment_of[member.name]
            for tensor in self.call.outputs[member.name]:
                readers = self._readers[tensor.name]
                if readers - {own} or tensor.name in results:
                    names.append(tensor.name)
        return names


class Segment:
    """A subgraph on its rank: a function that is done as a whole, of a token and of what it reads."""

    def __init__(self, subgraph: Subgraph, variables: list[tf.Variable], specs: list[tf.TensorSpec]):
        self.subgraph = subgraph
        definition = graph_pb2.GraphDef.FromString(subgraph.definition)
        used = {name: variables[number] for name, number in subgraph.variables.items()}

        def run(token: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, ...]:
            graph = ops.get_default_graph()
            for variable in used.values():
                resource_variable_ops.variable_accessed(variable)
            known = {name: graph.capture(variable.handle) for name, variable in used.items()}
            known.update(zip(subgraph.arguments, values, strict=True))
            self._own_gradients(definition, graph, known)
            made = graphs.put(definition, known, subgraph.outputs)
            outputs = zip(subgraph.outputs, made, strict=True)
            return tf.identity(token), *(
                tf.stop_gradient(tensor) if name in subgraph.stopped else tensor for name, tensor in outputs
            )

        function = tf.function(run, autograph=False, experimental_attributes={"_noinline": True})
        self.function = function.get_concrete_function(tf.TensorSpec([], tf.float32), *specs)

    def _own_gradients(self, definition: graph_pb2.GraphDef, graph: tf.Graph, known: dict[str, tf.Tensor]) -> None:
        handles = {number: known[name] for name, number in self.subgraph.variables.items()}
        graphs_of = {"": definition.node} | {each.signature.name: each.node_def for each in definition.library.function}
        for own in self.subgraph.own_gradients:
            of_segment = functools.partial(_here, known, graph)
            registered = own.register(tensor_in_function if own.function else of_segment, handles)
            [node] = [node for node in graphs_of[own.function] if node.name == own.operation]
            node.attr[ATTRIBUTE].s = registered.encode()


def _here(known: dict[str, tf.Tensor], graph: tf.Graph, _: tf.Graph, name: str) -> tf.Tensor:
    return known[name] if name in known else graph.get_tensor_by_name(name)
