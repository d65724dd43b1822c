# SPDX-License-Identifier: Apache-2.0
"""States of an optimizer that may be looked up by parameters of the model, too."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch


class States(collections.defaultdict):
    """The states of what stands in an optimizer's groups. A parameter that something else stands for has the state of
    that one: this rank's part. A parameter that has its state on another rank, or none yet, has an empty one here,
    which is not kept; so looking one up changes nothing.

    Args:
        states: as the optimizer had them.
        part: makes a state of a place out of one of the whole parameter.

    Attributes:
        places: what stands for a parameter, None where that is on another rank, by id(parameter).
    """

    def __init__(
        self,
        states: Mapping[Any, Any],
        places: dict[int, torch.Tensor | None],
        part: Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Any],
    ):
        super().__init__(dict, states)
        self.places = places
        self._part = part

    def __missing__(self, key: Any) -> Any:
        if id(key) not in self.places:
            return super().__missing__(key)
        place = self.places[id(key)]
        return {} if place is None else dict.get(self, place, {})

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._place(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's."""
        return super().get(self._place(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self._place(key)
        if place is not key and isinstance(value, Mapping):
            value = self._part(place, key, value)
        if place is not None:
            super().__setitem__(place, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's."""
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._place(key))

    def pop(self, key: Any, *default: Any) -> Any:
        """As a dictionary's."""
        return super().pop(self._place(key), *default)

    def __reduce__(self) -> tuple:
        return collections.defaultdict, (dict,), None, None, iter(self.items())

    def _place(self, key: Any) -> Any:
        return self.places.get(id(key), key)
