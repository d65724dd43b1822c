# SPDX-License-Identifier: Apache-2.0
"""Which modules share attributes, seen in a trace: what one sets, or changes the content of, and another one reads.

They are tied, with what calls them, to live on one rank, where they see what they would in one process; see [Note:
homes of attributes]. So are a module and those that it calls between the two halves of an update, where another
microbatch would come in between; see [Note: updates].
"""

import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lamina.modules.tree import ModuleTree
from lamina.script_state.aliases import Aliases
from lamina.script_state.content import Content, content, is_generator, same
from lamina.script_state.kinds import codes, is_torchs
from lamina.shared_state.closures import SharedNames
from lamina.torch_patches import scoped
from lamina.util import pytree

_TORCHS = frozenset(dir(nn.Module)) | frozenset(vars(nn.Module()))

Key = tuple[int, str]  # id of a module, and the name of an attribute


@dataclass(frozen=True)
class Tie:
    """Nodes that have to be on one rank, and the attribute that ties them."""

    nodes: frozenset[int]
    attribute: str


@dataclass
class Writes:
    """State that modules write when they are called.

    Attributes:
        attributes: those that are set, each with its module, by its place among the model's, and a node that uses it.
        nodes: that write state.
        late: of those, the ones that update a buffer with what modules return that they call.
    """

    attributes: list[tuple[int, str, int]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


@dataclass
class _Frame:
    """One call of a node.

    Attributes:
        began: how many calls there had been.
        reads: how many calls and how many operations there had been when an attribute was read last.
    """

    node: int
    began: int
    reads: dict[Key, tuple[int, int]] = field(default_factory=dict)


class StateWatch:
    """Notes the modules that set and that read attributes of a model's modules, and those that write buffers and other
    tensors in place.

    Args:
        tree: the model's.
    """

    def __init__(self, tree: ModuleTree):
        self._tree = tree
        self._modules = list(tree.root.modules())
        self._modules_by_id = {id(module): module for module in self._modules}
        self._paths = {id(module): path for path, module in tree.root.named_modules()}
        self._users: dict[Key, set[int]] = defaultdict(set)
        self._written: set[Key] = set()
        self._aliases: Aliases[Key] = Aliases()  # the attributes that hold objects, buffers and other tensors
        self._before: list[Content] = []  # what each object had when the trace began, but for what is held itself
        self._frames = [_Frame(0, 0)]
        self._entered: list[int] = []
        self._operations = 0
        self._first_set: dict[Key, bool] = {}  # by what it was used first
        self._torn: dict[Key, set[int]] = defaultdict(set)
        self._applied: dict[Key, set[int]] = defaultdict(set)  # what autograd functions use in their backward
        self._writers: set[int] = set()
        self._late: set[int] = set()
        paths = tree.root.named_modules()
        self._names = SharedNames((path, module, tree.node(module)) for path, module in paths)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, attributes are watched. The modes that modules have are as they will be called with."""
        for module in self._modules:
            for name, value in [*vars(module).items(), *module._buffers.items()]:
                if name not in _TORCHS:
                    self._aliases.add((id(module), name), value)
        self._before = self._contents()
        before = {id(module): dict(vars(module)) for module in self._modules}
        with scoped.attributes(self._set, self._get), scoped.functions(self._apply):
            yield
        self._look_at_dictionaries(before)

    def _look_at_dictionaries(self, before: dict[int, dict[str, Any]]) -> None:
        """Notes what was set past `__setattr__`, in a module's `__dict__`: by one of those that had that in hand."""
        for module in self._modules:
            old = before[id(module)]
            for name, value in vars(module).items():
                key = id(module), name
                if name not in _TORCHS and key not in self._written and not same(old.get(name, self), value):
                    self._written.add(key)
                    self._users[key] |= self._users[id(module), "__dict__"]

    def enter(self, node: int) -> None:
        """A call of a node begins."""
        self._names.enter(self._frames[-1].node)
        self._entered.append(node)
        self._frames.append(_Frame(node, len(self._entered)))

    def leave(self) -> None:
        """The innermost call ends."""
        self._names.leave(self._frames.pop().node)

    def operation(self, inputs: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """The innermost node runs an operation, which writes some of its inputs."""
        if not all(map(self._aliases.ways_to_memory, inputs)):
            self._operations += 1
        for tensor in written:
            for key in self._aliases.ways_to_memory(tensor):
                self._write(key, is_tensors=True)

    def ties(self) -> list[Tie]:
        """Returns what was found, once the model has been called."""
        for (held, keys), before, after in zip(
            self._aliases.objects.values(), self._before, self._contents(), strict=True
        ):
            users = set().union(*(self._users[key] for key in keys))
            if after != before or (is_generator(held) and len(users) > 1):
                for key in keys:
                    self._written.add(key)
                    self._users[key] |= users
        for _, keys in self._aliases.memories.values():
            if not self._written.isdisjoint(keys):
                users = set().union(*(self._users[key] for key in keys))
                self._written.update(keys)
                self._users.update(dict.fromkeys(keys, users))
        shared = {key: self._users[key] | self._torn.get(key, set()) for key in self._written}
        tied = {key: nodes for key, nodes in (shared | self._applied).items() if len(nodes) > 1}
        found = [(nodes, self._path(*key)) for key, nodes in tied.items()] + self._names.ties()
        return [Tie(frozenset(self._with_callers(nodes)), name) for nodes, name in found]

    def _contents(self) -> list[Content]:
        return [content(held, self._aliases.objects) for held, _ in self._aliases.objects.values()]

    def _with_callers(self, nodes: set[int]) -> set[int]:
        """These and all between them: so that no call from another rank is between what sets and what reads."""
        above = {node: [node] for node in nodes}
        for way in above.values():
            while way[-1] > 0:
                way.append(self._tree.parents[way[-1]])
        common = set.intersection(*map(set, above.values()))
        return {max(common)} | {node for way in above.values() for node in way if node not in common}

    def writes(self) -> Writes:
        """After `ties`."""
        places = {key: place for place, key in enumerate(self._paths)}
        attributes = [
            (places[module], name, min(users))
            for module, name in self._written
            if (users := self._users[module, name]) and not _is_tensors(self._modules[places[module]], name)
        ]
        return Writes(attributes, sorted(self._writers), sorted(self._late))

    def _set(self, original: Callable, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._paths and name not in _TORCHS and not isinstance(value, nn.Module):
            state, key = vars(module), (id(module), name)
            is_tensors = _is_tensors(module, name)
            old = state.get(name, getattr(type(module), name, None))
            if is_tensors or not same(old, value):
                counted = isinstance(old, (numbers.Number, torch.Tensor)) and not isinstance(old, bool)
                self._write(key, is_tensors, is_tensors or counted)
        original(module, name, value)

    def _get(self, module: nn.Module, name: str) -> Any:
        if name == "__dict__" and id(module) in self._paths:
            self._users[id(module), name].add(self._frames[-1].node)
        if name not in _TORCHS and id(module) in self._paths:
            key, frame = (id(module), name), self._frames[-1]
            self._users[key].add(frame.node)
            self._first_set.setdefault(key, False)
            frame.reads[key] = len(self._entered), self._operations
        return object.__getattribute__(module, name)

    def _apply(self, original: Callable, function: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Notes the modules that an autograd function is given, where its backward uses more of them than their calls.
        That backward runs where the function was applied."""
        used = _names_in(getattr(function, "backward", None))
        for module in _modules_in((args, kwargs)) if used else ():
            names = sorted(used & _names_of(module))
            if id(module) in self._paths and names:
                self._applied[id(module), names[0]] |= {self._frames[-1].node, self._tree.node(module)}
        return original(*args, **kwargs)

    def _write(self, key: Key, is_tensors: bool, may_be_update: bool = True) -> None:
        """The innermost node writes what an attribute of a module is, or has in its memory."""
        frame, module = self._frames[-1], self._modules_by_id[key[0]]
        self._written.add(key)
        self._users[key] |= {frame.node, self._tree.node(module) if is_tensors else frame.node}
        self._writers.add(frame.node)
        read = frame.reads.get(key)
        if read is None or not may_be_update or self._first_set.setdefault(key, True):
            return
        calls, operations = read
        if len(self._entered) > calls:
            self._torn[key] |= {frame.node, *self._entered[calls:]}
        elif is_tensors and operations != self._operations and calls > frame.began:
            self._late.add(frame.node)

    def _path(self, module: int, name: str) -> str:
        return ".".join(filter(None, (self._paths[module], name)))


def _is_tensors(module: nn.Module, name: str) -> bool:
    """True for a parameter or buffer of the module."""
    return name in module._parameters or name in module._buffers


def _names_in(function: Any) -> set[str]:
    """Names of attributes and methods in the code of a function that is not torch's."""
    if not isinstance(function, FunctionType) or is_torchs(function):
        return set()
    return {name for code in codes(function.__code__) for name in code.co_names}


def _names_of(module: nn.Module) -> set[str]:
    """Names of what a module has beside what every one of torch's has."""
    methods = {name for kind in type(module).__mro__ if not is_torchs(kind) for name in vars(kind)}
    return {*(methods - _TORCHS), "forward", *(vars(module).keys() - _TORCHS), *module._parameters, *module._buffers}


def _modules_in(values: Any) -> list[nn.Module]:
    """Modules in nested containers, and theirs."""
    found: dict[int, nn.Module] = {}

    def take(value: Any) -> Any:
        if isinstance(value, nn.Module):
            found.update((id(each), each) for each in value.modules())
            return value
        return None

    pytree.map_values(take, values)
    return list(found.values())
