# SPDX-License-Identifier: Apache-2.0
"""Changes of what one rank can reach, made on another one that can reach the same.

A holder goes by its name and kind, and by how many of those came before it: ranks that have built the same objects find
the same ones. What is held on both sides stays one object there; anything else is pickled.
"""

import io
import pickle
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lamina.script_state.holders import Content, Elements, Holder
from lamina.script_state.kinds import MISSING
from lamina.script_state.walk import Reach

Address = tuple[str, str, int]


@dataclass
class Difference:
    """A holder that has other things than before.

    Attributes:
        name: of the holder, for messages.
        set: what is new in it, or in the place of something else, by its key.
        gone: keys of what was taken out.
        grown: whether it is a list to which that was added at its end.
    """

    name: str
    holder: Holder
    set: Content
    gone: list[Any]
    grown: bool = False

    def first(self) -> str:
        """The name of one thing that changed."""
        return self.holder.path(self.name, next(iter([*self.set, *self.gone]), ""))


def differences(reach: Reach) -> list[Difference]:
    """Returns what has changed since. Files that were imported in between are no change."""
    found = []
    for name, holder, before, now in reach.changed():
        fresh = {key: value for key, value in now.items() if before.get(key, MISSING) is not value}
        fresh = {key: value for key, value in fresh.items() if not isinstance(value, ModuleType)}
        gone = [key for key in before if key not in now]
        grown = isinstance(holder, Elements) and not gone and fresh.keys().isdisjoint(before)
        if fresh or gone:
            found.append(Difference(name, holder, fresh, gone, grown))
    return found


class Places:
    """Where the holders of a walk are, on any rank that has made the same walk."""

    def __init__(self, reach: Reach):
        self._holders: dict[Address, Holder] = {}
        self._addresses: dict[int, Address] = {}  # by the id of what is held
        self._of_holders: dict[int, Address] = {}
        seen: Counter[tuple[str, str]] = Counter()
        for name, holder in reach.holders():
            kind = name, type(holder).__name__
            address = (*kind, seen[kind])
            seen[kind] += 1
            self._holders[address] = holder
            self._of_holders[id(holder)] = address
            self._addresses.setdefault(id(holder.held), address)

    def pack(self, difference: Difference) -> bytes:
        """One difference, as it travels.

        Errors:
            Whatever its parts raise that cannot be pickled.
        """
        file = io.BytesIO()
        address = self._of_holders[id(difference.holder)]
        _Pickler(file, self._addresses).dump((address, difference.set, difference.gone, difference.grown))
        return file.getvalue()

    def apply(self, packed: bytes, leave: Container[int] = ()) -> str:
        """Makes a change of another rank here. Returns its name where there is no such thing here, or where the id of
        what holds it is one to leave; else ""."""
        (name, *rest), fresh, gone, grown = _Unpickler(io.BytesIO(packed), self._holders).load()
        holder = self._holders.get((name, *rest))
        if holder is None or id(holder.held) in leave:
            return name
        content = holder.content()
        if grown:
            content |= dict(enumerate(fresh.values(), len(content)))
        else:
            content |= fresh
        holder.put({key: value for key, value in content.items() if key not in gone})
        return ""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, addresses: dict[int, Address]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._addresses = addresses
        self._protocol = pickle.HIGHEST_PROTOCOL

    def persistent_id(self, value: Any) -> Address | None:
        if isinstance(value, nn.Parameter):
            raise pickle.PicklingError("a parameter is one on each rank")
        return self._addresses.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Tensors without their graph."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(self._protocol)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, holders: dict[Address, Holder]):
        super().__init__(file)
        self._holders = holders

    def persistent_load(self, address: Address) -> Any:
        holder = self._holders.get(tuple(address))
        if holder is None:
            raise pickle.UnpicklingError(f"there is no {address[0]} here")
        return holder.held
