# SPDX-License-Identifier: Apache-2.0
"""Members of the groups of an optimizer whose parameters live on several ranks.

[Note: names of parameters] In a full state dict of an optimizer a parameter is a number, as in torch's: its position in
the groups as they were made. In a partial one, and between ranks, it is its name in the model; a parameter that is not
the model's goes by its place, "group:position".
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel
from lamina.optim.registry import needs_of
from lamina.optim.shards import held_of, parameter_of
from lamina.optim.states import States
from lamina.optim.whole import WholeParameters

# Per group, the parameters of the whole optimizer: the name, and the one that it was given to the optimizer with.
Layout = list[list[tuple[str, str | None]]]


@dataclass(frozen=True)
class Member:
    """A parameter in a group."""

    parameter: torch.Tensor
    name: str  # see [Note: names of parameters]
    given: str | None  # the name it was given to the optimizer with
    local: bool


class Roster:
    """The members of an optimizer's groups, those that live elsewhere included.

    Args:
        optimizer: of the parameters of the model, all of them or those of this rank.
        steps: knows what stands in for them in the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: _lamina.OptimizerSteps):
        self._optimizer = optimizer
        self._steps = steps
        self._made_with: list[list[tuple[torch.Tensor, str | None]]] = []  # per group
        self.has_others = False  # than parameters in their places: shards, or stand-ins
        self.wholes: WholeParameters | None = None  # for an optimizer that needs all of a parameter
        self._seen: dict[int, torch.Tensor] = {}  # parameters that the groups were given, by id
        self._places: dict[int, torch.Tensor | None] = {}  # as States has them; `_made_with` keeps the parameters

    def trim(self, model: PartitionedModel) -> None:
        """Drops the parameters that other ranks own from the optimizer, in place, and remembers them."""
        foreign = {id(tensor) for _, tensor, owner in model.tensors() if owner != model.partition}
        self._take_beside()
        if not current.job().leads:
            foreign |= set(map(id, self._steps.beside))
        for number, group in enumerate(self._optimizer.param_groups):
            if number == len(self._made_with):
                self._made_with.append(_given(group))
            elif any(id(parameter) in foreign for parameter in group["params"]):
                self._made_with[number] = _given(group)
        _drop(self._optimizer, foreign)
        self._places |= dict.fromkeys(foreign)
        self.has_others = self._steps.replaces
        if self.has_others:
            self._replace({id(tensor) for _, tensor, _ in model.tensors()}, model.sharding)
        self.see_to_states()

    def _take_beside(self) -> None:
        """See [Note: beside the model] in lamina/distributed_optimizer/beside.h; collective over the world."""
        new = [place for place in self.places() if id(place) not in self._seen]
        self._seen |= {id(place): place for place in new}
        self._steps.take_beside([place for place in new if self._steps.is_beside(place)])

    def see_to_states(self) -> None:
        """Has the optimizer's states, which torch makes anew when it loads some, be found by parameters."""
        if self._places and not isinstance(self._optimizer.state, States):
            self._optimizer.state = States(self._optimizer.state, self._places, self._part)

    def _replace(self, of_model: set[int], sharding: _lamina.Sharding | None) -> None:
        """Puts shards and stand-ins into the places of parameters, in place, with their states."""
        if self.wholes is None and needs_of(type(self._optimizer)) == "whole":
            self.wholes = WholeParameters(self._optimizer, self._steps)
        states = []
        for group in self._optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if id(parameter) not in of_model:
                    continue
                own = self._steps.place_of(held_of(parameter, sharding))
                if own is not parameter:
                    group["params"][number] = own
                    states.append((own, parameter.shape, self._optimizer.state.pop(parameter, None)))
                    self._places[id(parameter)] = own
        if self.wholes is not None:
            self._steps.spread_wholes(self.places())
        for own, shape, state in states:
            if state is not None and (own_state := self._part(own, shape, state)):
                self._optimizer.state[own] = own_state

    def _part(self, place: torch.Tensor, shape: torch.Size, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of what is in the place of a parameter of that shape from the parameter's."""
        if self.wholes is not None and self._steps.is_part(place):
            return dict(state) if self._steps.updates_whole(place) else {}

        def part(value: Any) -> Any:
            is_like = isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0
            return self._steps.part_of(place, value).to(place.dtype) if is_like else value

        return {name: part(value) for name, value in state.items()}

    def parameter_of(self, place: torch.Tensor) -> torch.Tensor:
        """The parameter of the model that a tensor of the groups is, or stands for."""
        return parameter_of(self._steps.holder_of(place), shards.of_job())

    def places(self) -> list[torch.Tensor]:
        """Lists what the groups hold."""
        return [place for group in self._optimizer.param_groups for place in group["params"]]

    def is_whole(self) -> bool:
        """True where no parameter was dropped, or made a shard."""
        groups = zip(self._made_with, self._optimizer.param_groups, strict=False)
        return not self.has_others and all(len(whole) <= len(group["params"]) for whole, group in groups)

    def members(self) -> list[list[Member]]:
        """Per group, its members as far as this rank knows them."""
        job = current.job()
        model = job.model
        names = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
        groups = []
        for number, group in enumerate(self._optimizer.param_groups):
            local = {id(self.parameter_of(place)) for place in group["params"]}
            whole = self._made_with[number] if number < len(self._made_with) else []
            if not local <= {id(parameter) for parameter, _ in whole}:
                whole = _given(group)  # others have come in since
            groups.append(
                [
                    Member(parameter, names.get(id(parameter), f"{number}:{place}"), given, id(parameter) in local)
                    for place, (parameter, given) in enumerate(whole)
                ]
            )
        return groups

    def own_names(self) -> list[list[str]]:
        """Per group, the names of the parameters that this rank has, in the optimizer's order."""
        return [[member.name for member in group if member.local] for group in self.members()]

    def known(self) -> Layout:
        """The groups of the whole optimizer as far as this rank knows them."""
        return [[(member.name, member.given) for member in group] for group in self.members()]

    def layout(self) -> Layout:
        """The groups of the whole optimizer; collective over the pipeline. Groups that each rank made of its own
        parameters have the order of the model."""
        return self.agreed(current.session().all_gather("pp", self.known()))

    @staticmethod
    def agreed(everyone: list[Layout]) -> Layout:
        """The groups of the whole optimizer from what each rank knows of them."""
        if all(other == everyone[0] for other in everyone):
            return everyone[0]
        if len(counts := {len(other) for other in everyone}) > 1:
            raise UsageError(
                f"the optimizer has {' or '.join(map(str, sorted(counts)))} groups, depending on the rank",
                code="state-other-optimizer",
            )
        order = {name: place for place, (name, _) in enumerate(current.job().model.named_parameters())}
        merged = [dict(itertools.chain.from_iterable(group)) for group in zip(*everyone, strict=True)]
        return [sorted(group.items(), key=lambda item: order.get(item[0], len(order))) for group in merged]


def _drop(optimizer: torch.optim.Optimizer, foreign: set[int]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in foreign:
                optimizer.state.pop(parameter, None)
        kept = [(parameter, name) for parameter, name in _given(group) if id(parameter) not in foreign]
        group["params"][:] = [parameter for parameter, _ in kept]
        if "param_names" in group:
            group["param_names"] = [name for _, name in kept]


def _given(group: dict) -> list[tuple[torch.Tensor, str | None]]:
    """Its parameters, with the names that it was given them by."""
    return list(itertools.zip_longest(group["params"], group.get("param_names", ())))
