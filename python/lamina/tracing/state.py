# SPDX-License-Identifier: Apache-2.0
"""Which modules share attributes, seen in a trace: what one sets, or changes the content of, and another one reads.

They are tied, with what calls them, to live on one rank, where they see what they would in one process; see [Note:
homes of attributes].
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina.modules.tree import ModuleTree
from lamina.torch_patches import scoped
from lamina.util.contents import content, is_changeable, same, within

_TORCHS = frozenset(dir(nn.Module)) | frozenset(vars(nn.Module()))

Key = tuple[int, str]  # id of a module, and the name of an attribute


@dataclass(frozen=True)
class Tie:
    """Nodes that have to be on one rank, and the attribute that ties them."""

    nodes: frozenset[int]
    attribute: str


class StateWatch:
    """Notes who sets and who reads attributes of a model's modules.

    Args:
        tree: the model's.
        node: gives the node whose forward runs.
    """

    def __init__(self, tree: ModuleTree, node: Callable[[], int]):
        self._tree = tree
        self._node = node
        self._modules = list(tree.root.modules())
        self._paths = {id(module): path for path, module in tree.root.named_modules()}
        self._users: dict[Key, set[int]] = defaultdict(set)
        self._written: set[Key] = set()
        self._held: dict[int, tuple[Any, Any, list[Key]]] = {}  # objects, their content, the attributes that hold them

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, attributes are watched. Those that modules have are as they will be called with."""
        for module in self._modules:
            for name, value in list(vars(module).items()):
                if name not in _TORCHS and is_changeable(value):
                    for each in within(value):
                        self._held.setdefault(id(each), (each, content(each), []))[2].append((id(module), name))
        with scoped.attributes(self._set, self._get):
            yield

    def ties(self) -> list[Tie]:
        """Returns what was found, once the model has been called."""
        for held, before, keys in self._held.values():
            if content(held) != before:
                users = set().union(*(self._users[key] for key in keys))
                for key in keys:
                    self._written.add(key)
                    self._users[key] |= users
        shared = [key for key in self._written if len(self._users[key]) > 1]
        return [Tie(frozenset(self._with_callers(self._users[key])), self._path(*key)) for key in shared]

    def _with_callers(self, nodes: set[int]) -> set[int]:
        """These and all between them: so that no call from another rank is between what sets and what reads."""
        above = {node: [node] for node in nodes}
        for way in above.values():
            while way[-1] > 0:
                way.append(self._tree.parents[way[-1]])
        common = set.intersection(*map(set, above.values()))
        return {max(common)} | {node for way in above.values() for node in way if node not in common}

    def written(self) -> list[tuple[int, str, int]]:
        """Attributes that are set: of which module, by its place among the model's, which, and a node that uses it.
        After `ties`."""
        places = {key: place for place, key in enumerate(self._paths)}
        return [
            (places[module], name, min(users))
            for module, name in self._written
            if (users := self._users[module, name]) and not _is_tensors(self._modules[places[module]], name)
        ]

    def _set(self, original: Callable, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._paths and name not in _TORCHS and not isinstance(value, nn.Module):
            state, key = vars(module), (id(module), name)
            is_tensors = _is_tensors(module, name)
            if is_tensors or not same(state.get(name, getattr(type(module), name, None)), value):
                self._written.add(key)
                self._users[key] |= {self._node(), self._tree.node(module) if is_tensors else self._node()}
        original(module, name, value)

    def _get(self, module: nn.Module, name: str) -> Any:
        if name not in _TORCHS and id(module) in self._paths:
            self._users[id(module), name].add(self._node())
        return object.__getattribute__(module, name)

    def _path(self, module: int, name: str) -> str:
        return ".".join(filter(None, (self._paths[module], name)))


def _is_tensors(module: nn.Module, name: str) -> bool:
    """True for a parameter or buffer of the module."""
    return name in module._parameters or name in module._buffers
