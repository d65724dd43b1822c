# SPDX-License-Identifier: Apache-2.0
"""The parts of a model in which the ranks of a TP_GROUP compute with the batches of all of them.

[Note: regions] Without `prescaled_batch` every rank has a batch of its own. A region is a module inside of which the
ranks compute together: the smallest one that nothing in parts comes out of or goes into. So a sliced layer that takes
and gives wholes is one, and so is an attention between the layers that are cut by columns and the one that is cut by
rows. A DistributedModule that holds regions is one, and so is a container of nothing but regions, as an nn.Sequential
of blocks. How they compute is in turns.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.kept import Kept
from lamina.tensor_parallel.registry import DistributedModule
from lamina.tensor_parallel.turns import Turns, are_taken, take
from lamina.tensor_parallel.unslicing import remember
from lamina.util.module_names import is_in_module


class _Region:
    """A module that computes with the batches of all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if are_taken():
            return super().forward(*args, **kwargs)
        notes = self.__dict__
        return take(notes[layers.TURNS], notes[layers.KEPT], self, super().forward, args, kwargs)


class _Inside:
    """A sliced layer in a region. Outside of it, its ranks would add up what they compute of different batches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A backward computes activations again that were computed inside.
        if not are_taken() and torch._C._current_graph_task_id() < 0:
            region = self.__dict__[layers.REGION] or "the model"
            raise UsageError(
                f"a layer that is sliced was called outside of {region}, in which the "
                "ranks of a TP_GROUP compute with the batches of all of them: call that, or take prescaled_batch: true",
                code="tp-outside",
            )
        return super().forward(*args, **kwargs)


def make_regions(root: nn.Module, turns: Turns, smallest: bool) -> None:
    """Has the sliced layers of a model compute in regions; the smallest ones where partitions may cut larger ones."""
    names = _found(root, smallest)
    for name in names:
        module = root.get_submodule(name)
        if layers.TURNS in module.__dict__:  # it is in two places
            continue
        for layer in filter(layers.is_sliced, module.modules()):
            if layer is not module and layers.REGION not in layer.__dict__:
                remember(layer)
                layer.__dict__[layers.REGION] = name
                layer.__class__ = layers.with_other_forward(_Inside, type(layer))
        remember(module)
        module.__dict__[layers.TURNS] = turns
        module.__dict__[layers.KEPT] = Kept(turns.size, turns.index)
        module.__class__ = layers.with_other_forward(_Region, type(module))


def smallest(root: nn.Module) -> dict[str, nn.Module]:
    """The regions of a model's sliced layers, by name, none in another: those of layers that other ones need not be
    called with. A module that is in two places has one name."""
    modules = dict(root.named_modules(remove_duplicate=False))
    found = [_callable(modules, _around(modules, name)) for name in modules if layers.is_sliced(modules[name])]
    return {name: module for module, name in {modules[name]: name for name in _outermost(found)}.items()}


def batches(modules: Iterable[nn.Module]) -> list[int]:
    """With how many batches each of these modules computes, where the model has one."""
    modules = list(modules)
    found = {
        id(part): each.__dict__[layers.TURNS].size
        for each in modules
        if layers.TURNS in each.__dict__
        for part in each.modules()
    }
    return [found.get(id(module), 1) for module in modules]


def parameters(root: nn.Module) -> set[int]:
    """The id of each parameter in a region."""
    found = (module for module in root.modules() if layers.TURNS in module.__dict__)
    return {id(parameter) for module in found for parameter in module.parameters()}


def _found(root: nn.Module, smallest: bool) -> list[str]:
    """The names of the regions, none in another."""
    modules = dict(root.named_modules(remove_duplicate=False))
    found = [_callable(modules, _around(modules, name)) for name in modules if layers.is_sliced(modules[name])]
    if smallest:
        return _outermost(found)
    while (larger := [_stack(modules, name, _outermost(found)) for name in _outermost(found)]) != found:
        found = larger
    return found


def _outermost(names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    return [name for name in names if not any(name != other and is_in_module(name, other) for other in names)]


def _around(modules: dict[str, nn.Module], name: str) -> str:
    """The nearest module in which what the layer of this name gives in parts is taken, and the other way round. An
    embedding may give parts to one block after another: around it are all of these."""
    layer = modules[name]
    if isinstance(layer, nn.Embedding) and layers.gives_parts(layer):
        lists = [above for above in _up(name) if isinstance(modules[above], nn.ModuleList)]
        return lists[-1] if lists else ""
    wanted = [layers.takes_parts] if layers.gives_parts(layer) or layers.works_on_parts(layer) else []
    wanted += [layers.gives_parts] if layers.takes_parts(layer) or layers.works_on_parts(layer) else []
    for above in _up(name):
        if all(any(map(has, modules[above].modules())) for has in wanted):
            return above
    return ""


def _stack(modules: dict[str, nn.Module], name: str, regions: Iterable[str]) -> str:
    """The DistributedModule that has this region, or the nn.Sequential of nothing but regions; the region itself
    without one."""
    for above in reversed(list(_up(name))):
        if isinstance(modules[above], DistributedModule):
            return above
    above = name.rpartition(".")[0]
    if not name or not isinstance(modules[above], nn.Sequential):
        return name
    parts = [f"{above}.{child}" if above else child for child, _ in modules[above].named_children()]
    has_region = [any(is_in_module(region, part) for region in regions) for part in parts]
    bare = [next(modules[part].parameters(), None) is None for part in parts]
    return above if all(map(any, zip(has_region, bare, strict=True))) else name


def _up(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _callable(modules: dict[str, nn.Module], name: str) -> str:
    """The nearest module, from this one up, that is called."""
    is_list = lambda module: isinstance(module, (nn.ModuleList, nn.ModuleDict))  # noqa: E731
    return next((above for above in _up(name) if not is_list(modules[above])), "")
