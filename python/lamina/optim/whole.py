# SPDX-License-Identifier: Apache-2.0
"""Optimizers that need all of a parameter, over shards.

[Note: owners] Each sharded parameter of such an optimizer has an owner in the sharding group, which updates it for all,
and has its states. In a step the owner's groups have the whole parameter in the place of its shard, those of the others
have nothing there; afterwards all groups have shards again. Between steps a state is kept under the shard.
"""

from collections.abc import Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.job import current


class WholeParameters:
    """The sharded parameters of one optimizer, and who owns them.

    Args:
        optimizer: whose groups have shards.
        sharding: the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: _lamina.Sharding):
        self._optimizer = optimizer
        self._sharding = sharding
        self._owners: dict[int, int] = {}
        session = current.session()
        self._rank, self._load = session.group_rank("shard"), [0] * session.group_size("shard")
        self._put_aside: list[list[torch.Tensor]] = []  # shards that the groups have outside of a step
        self._wholes: list[tuple[int, torch.Tensor | None]] = []

    def spread(self) -> None:
        """Gives those that have none an owner: the largest ones first, each to the member that has the fewest bytes."""
        new = {number for group in self._optimizer.param_groups for number in self._numbers(group["params"])}
        new -= self._owners.keys()
        size = {number: self._sharding.parameter(number).nbytes for number in new}
        for number in sorted(new, key=lambda number: (-size[number], number)):
            owner = self._load.index(min(self._load))
            self._owners[number] = owner
            self._load[owner] += size[number]

    def owns(self, number: int) -> bool:
        """True where this rank updates that parameter."""
        return self._owners[number] == self._rank

    def begin(self) -> None:
        """Makes parameters that have gradients whole, on their owners, in the groups; collective over the sharding
        group."""
        shards = {number: self._sharding.shard(number) for number in self._owners}
        with_gradients = [number for number, shard in shards.items() if shard.grad is not None]
        everyone = current.session().all_gather("shard", with_gradients)
        updated = [(number, self._owners[number]) for number in sorted(set().union(*everyone))]
        gradients = self._sharding.to_owners(updated, [shards[number].grad for number, _ in updated])
        values = self._sharding.to_owners(updated, [shards[number] for number, _ in updated])
        self._wholes = [(number, value) for (number, _), value in zip(updated, values, strict=True)]
        places = {}
        for (number, whole), gradient in zip(self._wholes, gradients, strict=True):
            if whole is not None:
                whole.requires_grad_().grad = gradient
                places[number] = whole
        self._put_aside = [list(group["params"]) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"][:] = [
                place for each in group["params"] if (place := self._in_step(each, places)) is not None
            ]
        for number, whole in places.items():
            _move(self._optimizer.state, shards[number], whole)

    def end(self) -> None:
        """Gives all members their parts of what the owners have updated; collective over the sharding group."""
        updated = [(number, self._owners[number]) for number, _ in self._wholes]
        parts = self._sharding.from_owners(updated, [whole for _, whole in self._wholes])
        with torch.no_grad():
            for (number, _), part in zip(updated, parts, strict=True):
                self._sharding.shard(number).copy_(part)
        self.restore()

    def restore(self) -> None:
        """Puts the shards back into the groups, also after a step that failed."""
        for group, shards in zip(self._optimizer.param_groups, self._put_aside, strict=False):
            group["params"][:] = shards
        for number, whole in self._wholes:
            if whole is not None:
                _move(self._optimizer.state, whole, self._sharding.shard(number))
        self._put_aside, self._wholes = [], []

    def gathered(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """A state by name with those that other members own; collective over the sharding group."""
        names = self._names()
        own = {name: named["state"][name] for name in names if name in named["state"]}
        state = dict(named["state"])
        for part in current.session().all_gather("shard", own):
            state |= part
        return {**named, "state": state}

    def own_part(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """A state by name without those that other members own."""
        others = {name for name, number in self._names().items() if not self.owns(number)}
        return {**named, "state": {name: state for name, state in named["state"].items() if name not in others}}

    def _names(self) -> dict[str, int]:
        return {name: i for i, (name, _) in enumerate(self._sharding.parameters) if i in self._owners}

    def _numbers(self, tensors: list[torch.Tensor]) -> list[int]:
        return [number for each in tensors if (number := self._sharding.find_shard(each)) is not None]

    def _in_step(self, tensor: torch.Tensor, places: dict[int, torch.Tensor]) -> torch.Tensor | None:
        number = self._sharding.find_shard(tensor)
        return tensor if number is None else places.get(number)


def _move(state: dict[torch.Tensor, Any], before: torch.Tensor, after: torch.Tensor) -> None:
    if before in state:
        state[after] = state.pop(before)
