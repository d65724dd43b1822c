# SPDX-License-Identifier: Apache-2.0
"""Which ways, as attributes and names, lead to one thing, so that a change by one of them is a change of all."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from lamina.script_state.content import is_plain_tensor, memory_of, tensors_within, whole_of, within

Way = TypeVar("Way")


def things_in(value: Any, with_tensors: bool = True) -> Iterator[tuple[tuple[str, int], Any]]:
    """A value, and what is in it, by kind and number. `with_tensors`: tensors in a container are things, too."""
    for each in map(whole_of, objects := within(value)):
        yield ("object", id(each)), each
    for tensor in [value] if is_plain_tensor(value) else tensors_within(objects) if with_tensors else ():
        yield ("memory", memory_of(tensor)), tensor


class Aliases(Generic[Way]):
    """The ways that lead to each thing.

    Args:
        with_tensors: see `things_in`.

    Attributes:
        objects, memories: things by number, which are kept so that it stays theirs, each with the ways to it.
    """

    def __init__(self, with_tensors: bool = True):
        self.objects: dict[int, tuple[Any, list[Way]]] = {}
        self.memories: dict[int, tuple[Any, list[Way]]] = {}
        self._of_kind = {"object": self.objects, "memory": self.memories}
        self._with_tensors = with_tensors

    def add(self, way: Way, value: Any) -> None:
        """Notes that a way leads to a value, and to what is in it."""
        for (kind, number), thing in things_in(value, self._with_tensors):
            _, ways = self._of_kind[kind].setdefault(number, (thing, []))
            if not ways or ways[-1] is not way:
                ways.append(way)

    def ways(self, value: Any) -> list[Way]:
        """The ways that lead to a value, or to what is in it now."""
        keys = (key for key, _ in things_in(value, self._with_tensors))
        return [way for kind, number in keys for way in self._of_kind[kind].get(number, (None, ()))[1]]

    def ways_to_memory(self, tensor: torch.Tensor) -> list[Way]:
        """The ways that lead to tensors in the memory of this one."""
        return self.memories.get(memory_of(tensor), (None, []))[1]
