# SPDX-License-Identifier: Apache-2.0
"""A model that is cut: who owns what, everybody's values, and what each rank lets go."""

import io
import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.deferred_init import delayed
from lamina.model import shards
from lamina.modules.runs import Run
from lamina.modules.tree import ModuleTree, is_called
from lamina.tensor_parallel import layers
from lamina.torch_patches import printing
from lamina.tracing.state import Writes
from lamina.util.told import say, tell

Row = tuple[str, torch.Tensor, int]  # name, tensor, owner

PORTION_BYTES = 1 << 28  # so much of what others own may world rank 0 have to hold at a time


class PartitionedModel:
    """A model whose modules have owners.

    Attributes:
        tree: its modules.
        owners: per node of the tree, the partition that owns it.
        anywhere: the node of each module that runs where its argument lies (`lamina/remote/anywhere.h`), by id(module).
        partition: this rank's.
        session: of the job.
        runs: modules that are called at once, numbered on from the nodes.
        cut: the engine's.
        report: how it was cut, as `DistributedModel.partition_report` has it.
        conversions: how often dtypes or devices have changed.
        homes: where the trace saw attributes set, as `Homes.hear` takes it.
        writes: the state that the trace saw modules write; None where there was none.
        sharding: the engine's, with sharded_data_parallel_degree above 1.
        is_called_plainly: all of it is this rank's for a moment, with stand-ins for its tensors.
    """

    def __init__(
        self,
        tree: ModuleTree,
        cut: _lamina.Cut,
        report: dict[str, Any],
        session: _lamina.Session,
        writes: Writes | None = None,
    ):
        self.tree = tree
        self.owners = cut.owners
        self.anywhere = {id(tree.modules[node]): node for node, anywhere in enumerate(cut.anywhere) if anywhere}
        self.report = report
        self.partition = cut.here
        self.runs: list[Run] = []
        self.conversions = 0
        self.writes = writes
        self.homes = [(place, name, self.owners[node]) for place, name, node in writes.attributes] if writes else []
        self.cut = cut
        self.session = session
        self._tabled: list[tuple[str, int]] = []
        self._table: _lamina.ParameterTable | None = None
        self.sharding: _lamina.Sharding | None = None
        self.is_called_plainly = False

    def callee(self, number: int) -> nn.Module | Run:
        """Names what calls of that number are of."""
        nodes = len(self.tree.modules)
        return self.tree.modules[number] if number < nodes else self.runs[number - nodes]

    def callee_name(self, number: int) -> str:
        """Its name, for messages."""
        nodes = len(self.tree.names)
        return self.tree.names[number] or "the model" if number < nodes else self.runs[number - nodes].name

    def callee_owner(self, number: int) -> int:
        """The partition that owns it."""
        nodes = len(self.owners)
        return self.owners[number] if number < nodes else self.runs[number - nodes].owner

    def owner_of(self, name: str) -> int:
        """The owner of a parameter, buffer or module, or of any other part of a state dict, by name."""
        return self.cut.owner_of(name)

    def home_of(self, name: str) -> str:
        """Where what has that name lives, for messages; see `owner_of`."""
        partition = self.owner_of(name)
        return f"partition {partition} on rank {self.session.translate('partitions', partition)}"

    def gathered(self, own: dict[str, Any], to_first: bool = False) -> dict[str, Any]:
        """The owners' parts of a state dict as one, in the order that the plain model's has; with `to_first` nothing on
        all ranks but the first. Collective over the pipeline."""
        state = self.session.gather_state({name: packed(value) for name, value in own.items()}, to_first, self.cut)
        return {name: unpacked(value) for name, value in state.items()}

    def owns(self, name: str) -> bool:
        """True where this rank owns what has that name; see `owner_of`."""
        return self.cut.owns(name)

    def own_parameters(self) -> list[torch.Tensor]:
        """This rank's, as they are now, in no certain order."""
        if self.session.group_size("partitions") > 1:
            return [parameter for name, parameter in self.tree.root.named_parameters() if self.owns(name)]
        found: list[torch.Tensor | None] = []
        left, seen = [self.tree.root], set()
        while left:  # several times as fast as torch's walk, which makes names: this is done at every call of the model
            module = left.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                found += module._parameters.values()
                left += module._modules.values()
        return [parameter for parameter in found if parameter is not None]

    def whole_parts(self) -> dict[str, nn.Module]:
        """The largest modules below the root that are this rank's with all that is under them, by name."""

        def under(module: nn.Module, name: str) -> Iterable[tuple[str, nn.Module]]:
            if name and is_called(module) and all(self.elsewhere(part) is None for part in module.modules()):
                yield name, module
                return
            for child_name, child in module.named_children():
                yield from under(child, f"{name}.{child_name}" if name else child_name)

        return dict(under(self.tree.modules[0], ""))

    def elsewhere(self, module: nn.Module) -> int | None:
        """The partition of a module that another rank owns, None for any other module."""
        if self.is_called_plainly:
            return None
        node = self.tree.node(module)
        is_here = node is None or self.owners[node] == self.partition or id(module) in self.anywhere
        return None if is_here else self.owners[node]

    def tensors(self) -> list[Row]:
        """(name, tensor, owner) of every parameter and buffer, each once."""
        self.tree.require_unchanged(is_cut=any(owner != self.partition for owner in self.owners))
        return [(name, tensor, self.owner_of(name)) for name, tensor in named_tensors(self.tree.root)]

    @property
    def table(self) -> _lamina.ParameterTable:
        """The table of who holds what of its tensors, as they are now."""
        named = named_tensors(self.tree.root)
        tabled = [(name, id(tensor)) for name, tensor in named]  # which the table keeps
        if self._table is None or tabled != self._tabled:
            slicings = layers.slicings(self.tree.root)
            given = [
                (name, tensor, not isinstance(tensor, nn.Parameter), slicings.get(id(tensor))) for name, tensor in named
            ]
            self._table = _lamina.ParameterTable(self.session, self.cut, given)
            self._tabled = tabled
        return self._table

    def forget_table(self) -> None:
        """Has the table made anew when it is next asked for."""
        self._table = None

    @property
    def whole_everywhere(self) -> bool:
        """True where each rank has all of it, as it was cut. Alike on all ranks."""
        return (self._table or self.table).whole_everywhere

    def remote(self) -> dict[int, int]:
        """The number of each module that other ranks own, by id(module)."""
        modules = self.tree.modules
        return {id(module): node for node, module in enumerate(modules) if self.elsewhere(module) is not None}


def as_agreed(
    tree: ModuleTree, session: _lamina.Session, cut: _lamina.Cut, plan: str, word: tuple[dict[str, Any], Writes | None]
) -> PartitionedModel:
    """The model as all ranks cut it; collective over the world. Its tensors are laid out as they travel; values are
    still to come.

    Args:
        plan: as it is printed.
        word: the report, and the state that modules write, of world rank 0.
    """
    if session.size > 1:
        beside = tree.constants(), tree.hidden_modules()
        if not session.are_alike("world", str([sorted(each.items()) for each in beside])):
            constants, hidden = zip(*session.all_gather("world", beside), strict=True)
            _tell_of_constants(session, constants)
            _warn_of_hidden(hidden)
    if session.rank == 0 and session.group_size("partitions") > 1:
        say(plan.rstrip())
    model = PartitionedModel(tree, cut, word[0], session, word[1])
    _keep_dense(model)
    printing.install()
    _lay_out(tree.root)
    return model


def make_values(model: PartitionedModel, tensors: list[torch.Tensor]) -> None:
    """Makes delayed values of these tensors: of what is here, and on world rank 0, which has those that count, of all,
    if only for the moment."""
    needed = [model.session.rank == 0 or model.table.is_here(tensor) for tensor in tensors]
    delayed.initialise(itertools.compress(tensors, needed))
    for tensor in tensors:
        delayed.forget(tensor)


def take_values(model: PartitionedModel, sharding: _lamina.Sharding | None) -> None:
    """The values of all that has a row are here, or gone: sees to the others; collective over the world."""
    model.sharding = sharding
    _give_odd_buffers(model)
    if model.session.group_size("shard") > 1:
        own = [tensor for _, tensor, owner in model.tensors() if owner == model.partition]
        shards.name(sharding, [each for each in own if isinstance(each, nn.Parameter)], model.session)


def _lay_out(root: nn.Module) -> None:
    """Gives buffers whose elements lie on one another (expanded ones) a memory that can be written."""
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            for name, buffer in module._buffers.items():
                if buffer is None or _lamina.is_odd(buffer) or _lamina.is_released(buffer):
                    continue
                if torch._debug_has_internal_overlap(buffer) == 1:
                    module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _give_odd_buffers(model: PartitionedModel) -> None:
    """Sparse and quantised buffers, which stay on all ranks, get the values of world rank 0."""
    odd = [(name, buffer) for name, buffer in model.tree.root.named_buffers() if _lamina.is_odd(buffer)]
    if not odd or model.session.size == 1:
        return
    mine = [packed(buffer) for _, buffer in odd] if model.session.rank == 0 else None
    for (name, _), value in zip(odd, model.session.first_given("world", mine)[1], strict=True):
        path, _, attribute = name.rpartition(".")
        if model.session.rank != 0:
            model.tree.root.get_submodule(path)._buffers[attribute] = unpacked(value)


def let_go(model: PartitionedModel) -> None:
    """Frees the values of what other ranks own."""
    model.tree.require_unchanged(is_cut=True)
    model.session.release_others(model.table)


def bring_together(model: PartitionedModel) -> None:
    """Gives every rank the values of all parameters and buffers, in the memory of the CPU; collective over the
    pipeline."""
    root = model.tree.root
    own = {
        name: (tensor.detach().cpu(), isinstance(tensor, nn.Parameter))
        for name, tensor in named_tensors(root)
        if model.owns(name)
    }
    for name, (value, is_parameter) in model.gathered(own).items():
        if not model.owns(name):
            _give(root, name, value, is_parameter)


def _give(root: nn.Module, name: str, value: torch.Tensor, is_parameter: bool) -> None:
    path, _, attribute = name.rpartition(".")
    module = root.get_submodule(path)
    tensors = module._parameters if is_parameter else module._buffers
    tensor = tensors.get(attribute)
    if tensor is None:  # it came after the model was cut
        tensors[attribute] = nn.Parameter(value) if is_parameter else value
    elif _lamina.is_released(tensor):
        _lamina.restore(tensor, value)


def _keep_dense(model: PartitionedModel) -> None:
    """Where layers of a TransformerEncoder live elsewhere, it leaves off its nested tensors, which do not travel. In
    evaluation with a padding mask its results at padded positions are then a layer's, as in training, and not 0."""
    for module, owner in zip(model.tree.modules, model.owners, strict=True):
        if isinstance(module, nn.TransformerEncoder):
            inside = {id(part) for part in module.modules()}
            parts = zip(model.tree.modules, model.owners, strict=True)
            if any(id(part) in inside and other != owner for part, other in parts):
                module.use_nested_tensor = False


def _apart(everyone: Sequence[dict[str, str]]) -> str:
    """The names of what has different values on some ranks."""
    names = {name for each in everyone for name in each}
    return ", ".join(sorted(name for name in names if len({each.get(name) for each in everyone}) > 1))


def _warn_of_hidden(everyone: Sequence[dict[str, str]]) -> None:
    if apart := _apart(everyone):
        warnings.warn(
            f"{apart}: modules in a list, tuple or dictionary of Python's are no part of the model. Values differ "
            "between ranks and stay so, model.parameters() has them not, and no checkpoint does: put them into an "
            "nn.ModuleList or nn.ModuleDict (a comma after it makes a tuple), or give the ranks one seed",
            stacklevel=2,
        )


def _tell_of_constants(session: _lamina.Session, everyone: Sequence[dict[str, str]]) -> None:
    if (apart := _apart(everyone)) and session.rank == 0:
        tell(
            f"{apart}: tensors in attributes, which differ between ranks and stay so; register them "
            "as buffers, of which all get those of rank 0, or give the ranks one seed"
        )


def named_tensors(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under a module, but for odd ones."""
    plain = ((name, buffer) for name, buffer in root.named_buffers() if not _lamina.is_odd(buffer))
    return [*root.named_parameters(), *plain]


@dataclass
class _Odd:
    """A tensor that only torch can pack."""

    data: bytes


def packed(value: Any) -> Any:
    """A value as it travels: what no message can hold is packed."""
    if not isinstance(value, torch.Tensor) or not _lamina.is_odd(value):
        return value
    file = io.BytesIO()
    torch.save(value.detach(), file)
    return _Odd(file.getvalue())


def unpacked(value: Any) -> Any:
    """Undoes `packed`."""
    return torch.load(io.BytesIO(value.data), weights_only=True) if isinstance(value, _Odd) else value
