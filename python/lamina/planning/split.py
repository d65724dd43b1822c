# SPDX-License-Identifier: Apache-2.0
"""A model of torch cut between its operations: `torch.export` traces it, and the engine places what it computes."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.modules.placement import set_partition
from lamina.util.checks import require_module

# Statistics that these change, which their schemas do not say.
_CHANGED = {"aten::batch_norm": ("running_mean", "running_var"), "aten::instance_norm": ("running_mean", "running_var")}
_MAY_PASS_ON = "dropout"  # in the names of operations that may return what they read


class _Memory:
    """Which values may lie in the same memory, and which memory is written."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self._lies_in: dict[fx.Node, fx.Node] = {}
        written = set()
        for node in nodes:
            for read in _same_memory(node):
                self._lies_in[self.of(node)] = self.of(read)
            written |= set(_writes(node))
        self.written = {self.of(node) for node in written}

    def of(self, node: fx.Node) -> fx.Node:
        while node in self._lies_in:
            node = self._lies_in[node]
        return node

    def written_by_or_to(self, node: fx.Node) -> set[fx.Node]:
        """The written memory that an operation reads, writes or lies in."""
        return {self.of(each) for each in (node, *node.all_input_nodes)} & self.written


def _arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, fx.Node]]:
    """Its arguments that are values, as its schema has them."""
    schema = getattr(node.target, "_schema", None)
    for at, argument in enumerate(schema.arguments if schema else ()):
        given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if isinstance(value, fx.Node):
                yield argument, value


def _writes(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    changed = _CHANGED.get(schema.name, ()) if schema else ()
    return [
        value
        for argument, value in _arguments(node)
        if argument.name in changed or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _same_memory(node: fx.Node) -> list[fx.Node]:
    """Values that it reads and may return, or return a view of."""
    if node.target is operator.getitem:
        return [node.args[0]]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if _MAY_PASS_ON in schema.name:
        return node.all_input_nodes[:1]
    returned = {name for each in schema.returns if each.alias_info for name in each.alias_info.before_set}
    return [
        value
        for argument, value in _arguments(node)
        if argument.alias_info and returned & argument.alias_info.before_set
    ]


def _size_bytes(value: Any) -> int:
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    sizes = [each.numel() * each.element_size() for each in tensors]
    return sum(size for size in sizes if isinstance(size, int))


def _found(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


class _Graph:
    """An exported graph as the engine takes it."""

    def __init__(self, module: fx.GraphModule):
        self.nodes = list(module.graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.operations = [node for node in self.nodes if node.op == "call_function"]
        self.returned = next(node for node in self.nodes if node.op == "output").args[0]
        self.number = {node: at for at, node in enumerate(self.operations)}
        self.memory = _Memory(self.operations)
        self.tensors = {node: _found(module, node.target) for node in self.nodes if node.op == "get_attr"}
        self.variables = [
            node
            for node, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) or self.memory.of(node) in self.memory.written
        ]
        self._variable = {node: self._number_of(node) for node in self.variables}

    def _number_of(self, node: fx.Node) -> int:
        """The first one that is the same tensor."""
        tensor = self.tensors[node]
        return next(at for at, each in enumerate(self.variables) if self.tensors[each] is tensor)

    def sources(self, node: fx.Node) -> list[tuple[int, int]]:
        return [(self.number[each], 0) for each in node.all_input_nodes if each in self.number]

    def results(self) -> list[tuple[int, int]]:
        found = [each for each in pytree.tree_leaves(self.returned) if isinstance(each, fx.Node)]
        return [(self.number[each], 0) for each in dict.fromkeys(found) if each in self.number]

    def placed(self, config: _lamina.Config) -> list[int]:
        """The partition of each operation."""
        of_memory: dict[fx.Node, int] = {}
        rows = []
        for at, node in enumerate(self.operations):
            # Readers and writers of memory that is written stay together, as do the parts of what returns several.
            together = [of_memory.setdefault(memory, at) for memory in self.memory.written_by_or_to(node)]
            if node.target is operator.getitem:
                together += [self.number[each] for each in node.all_input_nodes if each in self.number]
            used = [self._variable[each] for each in node.all_input_nodes if each in self._variable]
            rows.append(
                _lamina.GraphOperation(
                    name=node.name,
                    inputs=self.sources(node),
                    variables=list(dict.fromkeys(used)),
                    layer="",
                    together=[each for each in together if each != at],
                    placed_at=None,
                    output_bytes=[_size_bytes(node.meta.get("val"))],
                )
            )
        sizes = [(str(node.target), _size_bytes(self.tensors[node])) for node in self.variables]
        return _lamina.place_operations(config, rows, sizes, self.results())[0]

    def cut(self, partitions: list[int], count: int) -> list[tuple[int, list[fx.Node]]]:
        """The segments in an order in which they can run: partition and operations of each."""
        last: dict[fx.Node, int] = {}  # by written memory
        after: list[list[int]] = []
        for at, node in enumerate(self.operations):
            memories = self.memory.written_by_or_to(node)
            after.append([last[memory] for memory in memories if memory in last])
            last.update(dict.fromkeys(memories, at))
        sources = [self.sources(node) for node in self.operations]
        made = _lamina.cut_graph(partitions, sources, after, [[] for _ in sources], self.results(), count)
        return [(at, [self.operations[each] for each in members]) for at, _, members in made.segments if members]

    def reads(self, members: list[fx.Node]) -> list[fx.Node]:
        """The values that a segment reads."""
        own = set(members)
        read = [each for node in members for each in node.all_input_nodes if each.op != "get_attr"]
        return [each for each in dict.fromkeys(read) if each not in own]

    def copied(self) -> set[fx.Node]:
        """Tensors that stay as they are: each segment has its own."""
        known = set(self.variables)
        return {node for node, each in self.tensors.items() if isinstance(each, torch.Tensor) and node not in known}


def _segment(graph: _Graph, members: list[fx.Node], made: list[fx.Node], copied: set[fx.Node]) -> fx.GraphModule:
    own = fx.Graph()
    here = {node: own.placeholder(node.name) for node in graph.reads(members)}
    attributes: dict[str, Any] = {}
    for node in members:
        for read in node.all_input_nodes:
            if read in here:
                continue
            tensor = graph.tensors[read]
            attributes[read.target] = tensor.clone() if read in copied else tensor
            here[read] = own.get_attr(read.target)
        here[node] = own.node_copy(node, lambda each: here[each])
    own.output(tuple(here[node] for node in made))
    return fx.GraphModule(attributes, own, "Segment")


class SplitModel(nn.Module):
    """A model in segments, its children, which it calls one after the other.

    It takes what the model took when it was exported: tensors of those shapes and types, and the same of all else.
    Parameters are those of the model, and keep their names behind that of their segment.
    """

    def __init__(
        self,
        graph: _Graph,
        segments: list[list[fx.Node]],
        call: tuple[tuple, dict[str, Any]],
        returned: pytree.TreeSpec,
    ):
        super().__init__()
        results = [each for each in pytree.tree_leaves(graph.returned) if isinstance(each, fx.Node)]
        for each in results:
            if each.op == "get_attr":
                raise UsageError(f"split_graph(): the model returns {each.target}, which is none of what it computes")
        read = {each for members in segments for each in graph.reads(members)} | set(results)
        copied = graph.copied()
        self._calls = []  # the names of what each segment reads and makes
        for at, members in enumerate(segments):
            made = [node for node in members if node in read]
            self.add_module(f"segment_{at}", _segment(graph, members, made, copied))
            self._calls.append(([node.name for node in graph.reads(members)], [node.name for node in made]))
        leaves, self._arguments = pytree.tree_flatten(call)
        self._keywords = list(call[1])
        self._inputs = [(node.name, _kept(each)) for node, each in zip(graph.inputs, leaves, strict=True)]
        self._returned = [
            each.name if isinstance(each, fx.Node) else _Constant(each) for each in pytree.tree_leaves(graph.returned)
        ]
        self._structure = returned
        self._mode: bool | None = None

    def keep_mode(self, mode: bool) -> None:
        """Has it be in that mode alone: it was exported in it."""
        self.train(mode)
        self._mode = mode

    def train(self, mode: bool = True) -> "SplitModel":
        if self.__dict__.get("_mode") not in (None, mode):
            was = "training" if self._mode else "evaluation"
            raise UsageError(
                f"split_graph() exported the model in {was} mode, and in the other one it computes something else, as "
                "with dropout and BatchNorm: split a model for each"
            )
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, arguments = pytree.tree_flatten((args, kwargs))
        if arguments != self._arguments:
            raise UsageError("split_graph() exported a call with other arguments: their number or their names differ")
        known = {}
        for (name, exported), given in zip(self._inputs, leaves, strict=True):
            if _kept(given) != exported:
                raise UsageError(f"split_graph() exported {name} as {_told(exported)}, not as {_told(_kept(given))}")
            known[name] = given
        for at, (read, made) in enumerate(self._calls):
            values = getattr(self, f"segment_{at}")(*(known[name] for name in read))
            known.update(zip(made, values, strict=True))
        returned = [each.value if isinstance(each, _Constant) else known[each] for each in self._returned]
        return pytree.tree_unflatten(returned, self._structure)


class _Constant:
    """A result that is the same each time."""

    def __init__(self, value: Any):
        self.value = value


def _kept(value: Any) -> Any:
    """An argument as calls are compared by it."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else (type(value), value)


def _told(kept: tuple[Any, Any]) -> str:
    kind, value = kept
    if not isinstance(kind, torch.dtype):
        return repr(value)
    return f"{str(kind).removeprefix('torch.')} {list(value)}"


def split_graph(model: nn.Module, *args: Any, **kwargs: Any) -> SplitModel:
    """Cuts a model between its operations, where few bytes go between partitions: `torch.export` traces a call, and the
    operations are planned as those of a graph. The module that is returned has the segments as children, each placed on
    its partition, and is then made a DistributedModel as any other. It shares the model's parameters.

    Args:
        model: not a DistributedModel. In training mode, where it is to be trained.
        args, kwargs: what it is called with for one microbatch. Each call has tensors of these shapes and types, and
            the same of all else.

    Errors:
        UsageError: torch.export refuses the model, for the reason in the message; or `auto_partition` is off.
    """
    require_module(model, "split_graph()")
    config = current.session().config
    if not config.auto_partition:
        raise UsageError("split_graph() plans what it cuts: it takes auto_partition, which is off")
    exported = _exported(model, args, kwargs)
    graph = _Graph(exported.module(check_guards=False))
    segments = graph.cut(graph.placed(config), config.partitions)
    split = SplitModel(graph, [members for _, members in segments], (args, kwargs), exported.call_spec.out_spec)
    for at, (partition, _) in enumerate(segments):
        set_partition(split.get_submodule(f"segment_{at}"), partition)
    split.train(model.training)
    if not _is_alike_in_other_mode(model, args, kwargs, exported):
        split.keep_mode(model.training)
    return split


def _exported(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, args, kwargs)
    except Exception as error:
        raise UsageError(f"split_graph(): torch.export refuses the model: {type(error).__name__}: {error}") from error


def _is_alike_in_other_mode(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], exported: torch.export.ExportedProgram
) -> bool:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(not model.training)
        return str(torch.export.export(model, args, kwargs).graph) == str(exported.graph)
    except Exception:
        return False
    finally:
        for module, mode in modes:
            module.training = mode
