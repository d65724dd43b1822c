# SPDX-License-Identifier: Apache-2.0
"""Values that the owners of a model's parts have, brought to the ranks that call the plain model."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel, named_tensors
from lamina.modules.tree import ModuleTree
from lamina.tensor_parallel import layers

_PLAIN = (bool, int, float, complex, str, type(None), torch.Tensor)


@dataclass
class Values:
    """Values of a model.

    Attributes:
        tensors: parameters and buffers, by name.
        hooked: names of parameters that have hooks where they live.
        attributes: plain ones of modules that live elsewhere, by the module's name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put_attributes(self, tree: ModuleTree) -> None:
        """Gives modules theirs."""
        modules = dict(zip(tree.names, tree.modules, strict=True))
        for name, attributes in self.attributes.items():
            vars(modules[name]).update(attributes)

    def otherwise_hooked(self, root: nn.Module) -> set[str]:
        """Names of parameters that have hooks where they live, and none here."""
        here = {name for name, parameter in root.named_parameters() if parameter._backward_hooks}
        return self.hooked - here


def of_first(session: _lamina.Session, root: nn.Module) -> Values | None:
    """Values of world rank 0, before the model is cut over partitions; collective over the world. None where nobody
    lacks them."""
    slicings = layers.slicings(root)
    mine = None
    if session.group_members("tp")[0] == 0:  # slices are put together
        wholes = {name: _whole(session, each.detach(), slicings.get(id(each))) for name, each in named_tensors(root)}
        mine = wholes if session.rank == 0 else None
    if session.group_size("replicas") > 1:
        return Values(session.first_given("world", mine)[1])
    return Values(mine) if slicings and mine is not None else None


def of_owners(model: PartitionedModel, wanted: bool) -> Values | None:
    """Values of all owners, on the rank that leads; nothing on others. Collective over the copy of the model and its
    sharding group.

    Args:
        wanted: whether this rank's pipeline is to have them, or is just asked for its slices.
    """
    if model.session.group_size("shard") > 1:
        model.session.largest("shard", 0)  # nobody is still writing to its shards, as a script may between steps
    own = {name: tensor for name, tensor in named_tensors(model.tree.root) if model.owns(name)}
    slicings, tensors = layers.slicings(model.tree.root), {}
    with shards.gathered_parameters([each for each in own.values() if isinstance(each, nn.Parameter)]):
        for name, each in own.items():
            whole = _whole(model.session, _kept(model, each), slicings.get(id(each)))
            if wanted:
                tensors[name] = whole
    if not wanted:
        return None
    hooked = {name for name, each in own.items() if isinstance(each, nn.Parameter) and each._backward_hooks}
    if model.session.group_size("partitions") == 1:
        return Values(tensors, hooked)
    mine: dict[str, Any] = {f"tensor {name}": value for name, value in tensors.items()}
    mine |= {f"hooked {name}": True for name in hooked}
    if not model.session.leads:
        mine |= {f"attribute {name}": value for name, value in _attributes(model)}
    values = Values()
    for key, value in model.session.gather_state(mine, True).items():
        kind, name = key.split(" ", 1)
        if kind == "tensor":
            values.tensors[name] = value
        elif kind == "hooked":
            values.hooked.add(name)
        else:
            module, _, attribute = name.rpartition(".")
            values.attributes.setdefault(module, {})[attribute] = value
    return values


def _whole(session: _lamina.Session, tensor: torch.Tensor, slicing: layers.Slicing | None) -> torch.Tensor:
    return tensor if slicing is None else session.whole_of(tensor, slicing)


def _kept(model: PartitionedModel, tensor: torch.Tensor) -> torch.Tensor:
    """The value as it outlives what a sharded parameter has for a moment."""
    is_sharded = shards.number_of(model.sharding, tensor) is not None
    return tensor.detach().clone() if is_sharded else tensor.detach()


def _attributes(model: PartitionedModel) -> list[tuple[str, Any]]:
    """Plain attributes of the modules of this rank, which their forward may have set."""
    torchs = nn.Module().__dict__.keys()
    return [
        (f"{name}.{attribute}", value)
        for name, module, owner in zip(model.tree.names, model.tree.modules, model.owners, strict=True)
        if owner == model.partition
        for attribute, value in vars(module).items()
        if attribute not in torchs and type(value) in _PLAIN and "." not in attribute
    ]
