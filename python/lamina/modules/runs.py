# SPDX-License-Identifier: Apache-2.0
"""Runs: modules of an nn.Sequential, one after the other, that one other rank owns. They are called at once.

A Sequential that is cut hands the output of each module to the next one and does nothing between. So a call of several
of them is one message there and one back, instead of one for each. On their owner each is called as ever: with its
hooks, and in the random stream that it would have had alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lamina.modules.tree import ModuleTree
from lamina.torch_patches import module_call, sequential

Route = Callable[[int, tuple, dict[str, Any]], Any]


class Run:
    """Modules that are called at once.

    Args:
        name: "layers.3-5".
        number: by which the engine calls them.
        owner: the partition that owns them.
        within: the Sequential that holds them.
        places: of the first among its modules, and of what comes after the last.
        streams: how many of them run in a random stream of their own.
    """

    def __init__(self, name: str, number: int, owner: int, within: nn.Sequential, places: slice, streams: int):
        self.name, self.number, self.owner, self.streams = name, number, owner, streams
        self.within, self.places, self.parts = within, places, list(within._modules.values())[places]
        self._forward_hooks: dict[int, Callable[..., Any]] = {}  # torch's name: its modules have theirs

    @property
    def training(self) -> bool:
        return any(part.training for part in self.parts)

    def __call__(self, value: Any) -> Any:
        """Calls them here, for another rank."""
        for part in self.parts:
            value = module_call.call_served(part, value)
        return value

    def modules(self) -> Iterator[nn.Module]:
        """They, and all under them, each once."""
        return iter(dict.fromkeys(module for part in self.parts for module in part.modules()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The nodes of all of them, each once."""
        return iter(dict.fromkeys(parameter for part in self.parts for parameter in part.parameters()))


def find(
    tree: ModuleTree, owners: Sequence[int], anywhere: Sequence[int], own_stream: Sequence[bool], waited: Sequence[bool]
) -> list[Run]:
    """The runs of a model, numbered on from its modules; the same on every rank.

    Args:
        owners: per node of the tree, its partition.
        anywhere: nodes that run where their argument lies: with what is before them.
        own_stream: per node, whether its calls run in a random stream of their own.
        waited: per node, whether its results are waited for.
    """
    found: list[Run] = []
    floating = set(anywhere)
    for node, module in enumerate(tree.modules):
        if not _hands_on(module) or node in floating:
            continue
        keys, nodes = list(module._modules), [tree.node(child) for child in module._modules.values()]
        for first, last in _stretches(nodes, [_owner(each, owners, floating, waited, tree) for each in nodes]):
            if (owner := owners[nodes[first]]) == owners[node]:
                continue
            path = f"{tree.names[node]}." if tree.names[node] else ""
            name, places = f"{path}{keys[first]}-{keys[last]}", slice(first, last + 1)
            streams = sum(own_stream[each] for each in nodes[places])
            found.append(Run(name, len(tree.modules) + len(found), owner, module, places, streams))
    return found


def calls(runs: Sequence[Run], partition: int, route: Route) -> dict[int, sequential.Calls]:
    """By id of each Sequential, how it calls runs that other partitions own by `route`, at once."""
    found = {}
    for module, group in itertools.groupby(runs, key=lambda run: run.within):
        elsewhere = [run for run in group if run.owner != partition]
        children = list(module._modules.values())
        made: list[Callable[[Any], Any]] = [*children]
        for run in reversed(elsewhere):  # the places of those before it stay
            made[run.places] = [lambda value, number=run.number: route(number, (value,), {})]
        if elsewhere:
            found[id(module)] = children, made
    return found


def _hands_on(module: nn.Module) -> bool:
    """True where it does nothing but hand outputs on."""
    plain = isinstance(module, nn.Sequential) and sequential.is_plain(type(module))
    return plain and type(module).__iter__ is nn.Sequential.__iter__ and "forward" not in vars(module)


def _owner(
    node: int | None, owners: Sequence[int], floating: set[int], waited: Sequence[bool], tree: ModuleTree
) -> int | None:
    """The partition of a module that may be in a run, -1 for any, None where it may not."""
    if node is None or waited[node] or type(tree.modules[node]).__call__ is not nn.Module.__call__:
        return None
    return -1 if node in floating else owners[node]


def _stretches(nodes: Sequence[int | None], owners: list[int | None]) -> Iterator[tuple[int, int]]:
    """The first and last position of each stretch of several modules with one owner. What has none may be within one,
    not first in it."""
    first = 0
    for at in range(1, len(nodes) + 1):
        goes_on = at < len(nodes) and owners[first] not in (None, -1) and owners[at] in (owners[first], -1)
        if goes_on:
            continue
        if at - first > 1:
            yield first, at - 1
        first = at
