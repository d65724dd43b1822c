# SPDX-License-Identifier: Apache-2.0
"""Changes that one rank makes to what it can reach, made on others that have built the same.

A holder goes by its name and kind, and by how many of those came before it: ranks that have built the same objects find
the same ones. What is held on both sides stays one object there; anything else is pickled. Tensors, arrays and
generators, which are changed in place, go by their number in the walk.
"""

import io
import pickle
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from lamina.script_state.content import version_of
from lamina.script_state.generators import Source
from lamina.script_state.holders import Content, Elements, Holder
from lamina.script_state.kinds import MISSING, InPlaceOfValue
from lamina.script_state.walk import Reach
from lamina.util import devices

Address = tuple[str, str, int]
Refuse = Callable[[str, str], None]  # takes what cannot be brought, and why


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
    """Returns what has changed since. Files that were imported in between are no change, nor are descriptors that watch
    attributes, on each rank for itself."""
    found = []
    for name, holder, before, now in reach.changed():
        fresh = {key: value for key, value in now.items() if before.get(key, MISSING) is not value}
        fresh = {key: value for key, value in fresh.items() if not isinstance(value, (ModuleType, InPlaceOfValue))}
        gone = [key for key, value in before.items() if key not in now and not isinstance(value, InPlaceOfValue)]
        is_row = isinstance(holder, Elements) and holder.kind is not set
        grown = is_row and not gone and fresh.keys().isdisjoint(before)
        if fresh or gone:
            found.append(Difference(name, holder, fresh, gone, grown))
    return found


RefusePart = Callable[[Difference, Exception], None]  # takes a part that cannot be brought, and why


class Changes(NamedTuple):
    """Changes as they travel.

    Attributes:
        packed: those of holders.
        tensors, arrays: values, by number.
        states: of generators and bytes, with their kind, by number.
    """

    packed: list[bytes]
    tensors: dict[int, torch.Tensor]
    arrays: dict[int, Any]
    states: dict[int, tuple[str, bytes]]


class Snapshot:
    """A walk, and what of it is changed in place, as it was when that was noted.

    Args:
        reach: the walk.
    """

    def __init__(self, reach: Reach):
        self.reach = reach
        self._addresses: _Addresses | None = None
        self.note()

    def note(self, sources: Iterable[Source] = (), tensors: Iterable[torch.Tensor] = ()) -> None:
        """Notes how that is now.

        Args:
            sources, tensors: generators and tensors beside those that the walk has met.
        """
        self._tensors = list({id(each): each for each in (*self.reach.tensors, *tensors)}.values())
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._arrays = [array.copy() for array in self.reach.arrays]
        self._sources = [*self.reach.sources, *sources]
        self._states = [_state(source) for source in self._sources]

    def changes(self, found: list[Difference], refuse: RefusePart) -> Changes:
        """Returns what has changed since.

        Args:
            found: those of its `differences` that are to be brought.
            refuse: takes one of which a part cannot be pickled, with that part alone, and the error.
        """
        tensors = zip(self._tensors, self._versions, strict=True)
        arrays = zip(self.reach.arrays, self._arrays, strict=True)
        states = enumerate(zip(self._sources, self._states, strict=True))
        return Changes(
            [packed for each in found for packed in self._packed(each, refuse)],
            {at: each.detach() for at, (each, version) in enumerate(tensors) if version_of(each) != version},
            {at: each for at, (each, old) in enumerate(arrays) if each.tobytes() != old.tobytes()},
            {at: (source.kind, now) for at, (source, old) in states if (now := _state(source)) != old},
        )

    def apply(self, changes: Changes, refuse: Refuse, replaces: bool = False) -> None:
        """Makes these here, on another rank.

        Args:
            changes: those of the rank that has made them.
            refuse: takes what is not here, or has been changed here as well.
            replaces: whether the latter is made as there instead.
        """
        for at, value in changes.tensors.items():
            held = self._tensors[at] if at < len(self._tensors) else None
            if held is None or held.shape != value.shape or not (replaces or version_of(held) == self._versions[at]):
                refuse("a tensor", "this rank has another one")
            else:
                held.detach().copy_(value)
        for at, value in changes.arrays.items():
            held = self.reach.arrays[at] if at < len(self.reach.arrays) else None
            if held is None or held.shape != value.shape:
                refuse("an array", "this rank has another one")
            else:
                held[...] = value
        for at, (kind, state) in changes.states.items():
            source = self._sources[at] if at < len(self._sources) else None
            if source is None or source.kind != kind or not (replaces or _state(source) == self._states[at]):
                refuse(kind if source is None else source.name, "this rank has another one, or draws, too")
            else:
                source.put(pickle.loads(state))
        looks = changes.packed and not replaces
        changed_here = {id(each.holder.held) for each in differences(self.reach)} if looks else ()
        for each in changes.packed:
            if missing := self._known().apply(each, changed_here):
                refuse(missing, "this rank does not have it, or changes it, too")

    def _packed(self, difference: Difference, refuse: RefusePart) -> list[bytes]:
        try:
            return [self._known().pack(difference)]
        except Exception:
            packed = []
            for key, value in difference.set.items():
                part = replace(difference, set={key: value})
                try:
                    packed.append(self._known().pack(part))
                except Exception as error:
                    refuse(part, error)
            return packed

    def _known(self) -> "_Addresses":
        self._addresses = self._addresses or _Addresses(self.reach)
        return self._addresses


class _Addresses:
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


def _state(source: Source) -> bytes:
    """Its state, to compare it and to send it."""
    return pickle.dumps(source.get())


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
        """Tensors without their graph, and devices."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(self._protocol)
        return devices.reduced(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, holders: dict[Address, Holder]):
        super().__init__(file)
        self._holders = holders

    def persistent_load(self, address: Address) -> Any:
        holder = self._holders.get(tuple(address))
        if holder is None:
            raise pickle.UnpicklingError(f"there is no {address[0]} here")
        return holder.held
