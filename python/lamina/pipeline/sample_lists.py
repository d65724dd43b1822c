# SPDX-License-Identifier: Apache-2.0
"""Lists of a batch that hold an element for each sample: the engine decides which ones do ([Note: lists of samples] in
lamina/pipeline/lists.h)."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lamina import _lamina

_TENSOR, _LIST, _CONTAINER, _OTHER = range(4)  # as Part::Kind
_UNKNOWN, _ROWS, _ELEMENTS = range(3)  # as Part::Known

Children = Callable[[Any], list[tuple[str, Any]] | None]


class SampleLists:
    """Finds them in batch after batch: what was decided of a list once holds for its name.

    Args:
        children: what stands in a container, with labels; None for no container.
    """

    def __init__(self, children: Children):
        self._children = children
        self._known: dict[str, int] = {}

    def find(self, batch: Iterable[tuple[str, Any, int, bool]]) -> tuple[list[Any], str | None]:
        """The lists of samples of a batch, and the name of one that may be either.

        Args:
            batch: name, value, axis of each part, and whether it is said that tensors in it are cut along that axis.
        """
        walk = _Walk(self._children, self._known)
        for name, value, axis, is_said in batch:
            walk.add(name, value, axis, is_said, ())
        by_elements, not_clear = _lamina.lists_of_samples(walk.parts)
        if not_clear is not None:
            return [], walk.names[not_clear]
        for (kind, *_), name, is_cut in zip(walk.parts, walk.names, by_elements, strict=True):
            if kind == _LIST:
                self._known.setdefault(name, _ELEMENTS if is_cut else _ROWS)
        return [value for value, is_cut in zip(walk.values, by_elements, strict=True) if is_cut], None


class _Walk:
    def __init__(self, children: Children, known: dict[str, int]):
        self._children, self._known = children, known
        self.parts: list[tuple[int, int, int, int, int, int]] = []  # kind, size, end, dtype, dims, known
        self.names: list[str] = []
        self.values: list[Any] = []

    def add(self, name: str, value: Any, axis: int, is_said: bool, inside: tuple[int, ...]) -> None:
        place = len(self.parts)
        self.parts.append((_OTHER, 0, place + 1, 0, 0, _UNKNOWN))
        self.names.append(name)
        self.values.append(value)
        if is_tensor(value):
            if getattr(value, "is_nested", False):  # which has no rows, as whoever cuts it says
                return
            if -value.ndim <= axis < value.ndim:
                dtype = hash(str(value.dtype)) >> 1
                self.parts[place] = (_TENSOR, value.shape[axis], place + 1, dtype, value.ndim, _UNKNOWN)
            return
        held = None if id(value) in inside else self._children(value)
        if held is None or is_size(value):
            return
        for label, child in held:
            self.add(name + label, child, axis, is_said, (*inside, id(value)))
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
        known = _ROWS if is_said else self._known.get(name, _UNKNOWN)
        kind, size = (_LIST, len(value)) if is_list else (_CONTAINER, 0)
        self.parts[place] = (kind, size, len(self.parts), 0, 0, known)


def is_tensor(value: Any) -> bool:
    """True for what has rows: a tensor of torch's or an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def is_size(value: Any) -> bool:
    """True for a tuple of plain numbers."""
    return isinstance(value, tuple) and all(isinstance(each, (int, float)) for each in value)
