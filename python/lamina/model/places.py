# SPDX-License-Identifier: Apache-2.0
"""Places of parameters, buffers and modules, in which there is something else for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.model.partitioned import PartitionedModel, Row

Place = tuple[dict[str, Any], str, Any]  # a module's dictionary, a name in it, and the value


@contextmanager
def only_own(model: PartitionedModel) -> Iterator[list[Row]]:
    """Inside, the modules have no parameters and buffers of other ranks; yields (name, tensor, owner) of those."""
    foreign = [row for row in model.tensors() if row[2] != model.partition]
    scripted = [
        (module._modules, name, None)
        for module in _unscripted(model.tree.root)
        for name, child in module._modules.items()
        if isinstance(child, torch.jit.ScriptModule) and model.elsewhere(child) is not None
    ]  # nothing in one can be None: it is another rank's as a whole
    with replaced(scripted), without(model.tree.root, (tensor for _, tensor, _ in foreign)):
        yield foreign


@contextmanager
def own_and_shapes(model: PartitionedModel) -> Iterator[None]:
    """Inside, tensors without memory are in the places of other ranks' parameters and buffers. Modules that save and
    load in a way of their own look at them, and so do hooks of state dicts."""
    foreign = {id(tensor) for _, tensor, owner in model.tensors() if owner != model.partition}
    places = [place for module in _unscripted(model.tree.root) for place in places_of(module)]
    shapes = [(held, name, stand_in(tensor)) for held, name, tensor in places if id(tensor) in foreign]
    with only_own(model), replaced(shapes):
        yield


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """One of its shape without memory; of a sparse or quantised one a copy."""
    if _lamina.is_odd(tensor):
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def without(root: nn.Module, hidden: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the modules under `root` do not have these parameters and buffers."""
    ids = set(map(id, hidden))
    places = [place for module in _unscripted(root) for place in places_of(module)]
    with replaced([(held, name, None) for held, name, tensor in places if id(tensor) in ids]):
        yield


def places_of(module: nn.Module) -> list[Place]:
    """The places of a module's own parameters and buffers."""
    return [(held, name, value) for held in (module._parameters, module._buffers) for name, value in held.items()]


@contextmanager
def replaced(places: list[Place]) -> Iterator[None]:
    """Inside, these are in their places."""
    before = [(held, name, held[name]) for held, name, _ in places]
    for held, name, value in places:
        held[name] = value
    try:
        yield
    finally:
        for held, name, value in before:
            held[name] = value


def _unscripted(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
