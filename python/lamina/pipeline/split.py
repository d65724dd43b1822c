# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step function in the engine's words, and what it makes of them: the parts of each microbatch."""

import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import GeneratorType, SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lamina import _lamina
from lamina.util import pytree

# Iterators over batches. A counter, or a file that is written to, may go to every microbatch.
_READ_ONCE = (GeneratorType, _BaseDataLoaderIter, enumerate, filter, map, zip, type(iter([])))

Parts = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]


@dataclass(slots=True)
class Node:
    """A value of a batch, by the engine's number of it.

    Attributes:
        number, value: these.
        held: what stands in a container.
        rebuild: makes a container like it around other values.
    """

    number: int
    value: Any
    held: "list[Node]" = field(default_factory=list)
    rebuild: Callable[[list[Any]], Any] | None = None


class Walk:
    """Tells the engine what a batch holds, from outside in.

    Args:
        splitter: whom it tells.
        parts: as `parts_of`; it may leave out containers.
        reads_offsets: whether arrays are read that may hold some.

    Attributes:
        nodes: the values, by their numbers.
    """

    def __init__(
        self, splitter: _lamina.BatchSplitter, parts: Callable[[Any], Parts | None], reads_offsets: bool = False
    ):
        self._splitter, self._parts, self._reads_offsets = splitter, parts, reads_offsets
        self.nodes: list[Node] = []

    def add(self, name: str, value: Any, inside: tuple[int, ...] = ()) -> Node:
        """Adds a value of the argument that was begun last.

        Args:
            name, value: its path, as errors say it, and itself.
            inside: the ids of the containers that it is in.
        """
        node = Node(len(self.nodes), value)
        self.nodes.append(node)
        to = self._splitter
        if isinstance(value, torch.Tensor):
            to.add_tensor(name, value)
        elif is_tensor(value):
            values = _values(value) if self._reads_offsets else None
            to.add_array(name, value.shape, hash(str(value.dtype)) >> 1, id(value), values)
        elif callable(getattr(value, "smp_slice", None)):
            to.add_self_slicing(name, type(value).__name__)
        elif isinstance(value, PackedSequence):
            to.add_packed(name, "PackedSequence")
        elif isinstance(value, _READ_ONCE):
            to.add_read_once(name, type(value).__name__)
        elif id(value) in inside or (parts := self._parts(value)) is None:
            to.add_other(name)
        else:
            self._add_held(name, node, parts, (*inside, id(value)))
        return node

    def _add_held(self, name: str, node: Node, parts: Parts, inside: tuple[int, ...]) -> None:
        held, node.rebuild = parts
        value = node.value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            self._splitter.begin_list(name, len(value), _is_size(value), id(value))
        else:
            self._splitter.begin_container(name)
        node.held = [self.add(name + label, child, inside) for label, child in held]
        self._splitter.end()


class Splitter:
    """Splits the arguments of one call as the engine decides: first it looks at all of them.

    Tensors and numpy arrays are split into pieces, which are views; one that is given twice has the same pieces twice.
    Lists that hold an element for each sample are cut as they are. Other lists, tuples, sets, mappings, dataclasses,
    namespaces and what is registered with torch's pytree are searched for them. An object that has a method
    `smp_slice(num_mb, mb, axis)` is asked for its pieces. Everything else, 0-dimensional tensors too, goes to every
    microbatch as it is.

    Args:
        microbatches: as many as there are to be.
        needs_all: whether there are so many of a batch with fewer samples, too.
        known: what was decided of earlier batches.

    Attributes:
        engine: what decides.
    """

    def __init__(self, microbatches: int, needs_all: bool = False, known: _lamina.KnownParts | None = None):
        self.engine = _lamina.BatchSplitter(microbatches, needs_all)
        self._walk = Walk(self.engine, parts_of, reads_offsets=microbatches > 1)
        self._known = known or _lamina.KnownParts()
        self._arguments: list[Node] = []
        self._pieces: dict[tuple[int, int], list[Any]] = {}  # by id and axis

    def look(self, name: str, value: Any, axis: int = 0, is_said: bool = False) -> None:
        """Adds an argument.

        Args:
            name, value: its name and itself.
            axis: the axis along which its tensors are split.
            is_said: whether the caller has said that they are.
        """
        self.engine.begin_argument(name, axis, is_said)
        self._arguments.append(self._walk.add(name, value))

    def split(self) -> list[list[Any]]:
        """The parts of each argument, one for each microbatch.

        Errors:
            UsageError: what cannot be split, does not fit beside the others, or may be meant to be whole.
        """
        self.engine.decide(self._known)
        return [self._parts(argument) for argument in self._arguments]

    def _parts(self, node: Node) -> list[Any]:
        cut = self.engine.cut(node.number)
        if cut == "whole":
            return [node.value] * self.engine.microbatches
        if cut == "within":
            columns = [self._parts(child) for child in node.held]
            return [node.rebuild(list(parts)) for parts in zip(*columns, strict=True)]
        axis = self.engine.axis(node.number) if cut != "elements" else 0
        if cut == "itself":
            distinct = self.engine.distinct
            pieces = [node.value.smp_slice(distinct, microbatch, axis) for microbatch in range(distinct)]
            return pieces + pieces[-1:] * (self.engine.microbatches - distinct)
        key = id(node.value), axis
        if key not in self._pieces:
            self._pieces[key] = pieces_of(node.value, axis, self.engine.places(node.number))
        return self._pieces[key]


def pieces_of(tensor: Any, axis: int, places: list[tuple[int, int]]) -> list[Any]:
    """The pieces of a tensor, an array or a list that begin at these places and have these lengths; views where that
    can be."""
    if isinstance(tensor, (list, tuple)):
        return [tensor[begin : begin + length] for begin, length in places]
    if not isinstance(tensor, torch.Tensor):
        before = (slice(None),) * (axis % tensor.ndim)
        return [tensor[(*before, slice(begin, begin + length))] for begin, length in places]
    if tensor.layout != torch.strided:
        return [tensor.narrow_copy(axis, begin, length) for begin, length in places]
    pieces = [tensor.narrow(axis, begin, length) for begin, length in places]
    # A step body may write its piece. Views count the writes to all of the batch together, and autograd would take
    # those of other microbatches for a write to this one.
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]


def is_tensor(value: Any) -> bool:
    """True for what has rows: a tensor of torch's or an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def _is_size(value: Any) -> bool:
    """True for a tuple of plain numbers."""
    return isinstance(value, tuple) and all(isinstance(each, (int, float)) for each in value)


def _values(array: Any) -> torch.Tensor | None:
    """The numbers of an array that may hold offsets."""
    return torch.as_tensor(array) if array.ndim == 1 and array.dtype.kind in "iu" else None


def parts_of(value: Any) -> Parts | None:
    """Returns what stands in a container, with labels, and what makes one like it around other values; None for no
    container."""
    if isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()], lambda parts: _mapping(value, parts)
    if (held := pytree.children(value)) is not None:
        return list(held), lambda parts: pytree.rebuild(value, parts)
    if isinstance(value, SimpleNamespace):
        names = list(vars(value))
        return [(f".{name}", getattr(value, name)) for name in names], lambda parts: _with(value, names, parts)
    if (node := _pytree.SUPPORTED_NODES.get(type(value))) is not None and not isinstance(value, torch.Size):
        children, context = node.flatten_fn(value)
        return [(f"[{index}]", child) for index, child in enumerate(children)], lambda parts: node.unflatten_fn(
            parts, context
        )
    return None


def _mapping(value: Mapping, parts: list[Any]) -> Mapping:
    items = dict(zip(value, parts, strict=True))
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    other = copy.copy(value)  # with its other attributes
    before = dict(value)
    other.update(items)
    if any(value[key] is not child for key, child in before.items()):  # the copy has no items of its own
        value.update(before)
        return type(value)(items)
    return other


def _with(value: SimpleNamespace, names: list[str], parts: list[Any]) -> SimpleNamespace:
    other = copy.copy(value)
    vars(other).update(zip(names, parts, strict=True))
    return other
