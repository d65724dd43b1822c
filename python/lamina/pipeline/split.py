# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step function, split into microbatches."""

import copy
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType, SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.pipeline.sample_lists import SampleLists, is_tensor
from lamina.util import pytree

# Iterators over batches. A counter, or a file that is written to, may go to every microbatch.
_READ_ONCE = (GeneratorType, _BaseDataLoaderIter, enumerate, filter, map, zip, type(iter([])))
_NAMED = 8  # so many tensors are named in a summary
_OFFSETS = re.compile(r"offset|cu_?seq|indptr|row_?ptr|cumulat", re.IGNORECASE)  # in names of cumulative offsets

Parts = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]


class Splitter:
    """Splits the arguments of one call: first it looks at all of them, then `cut` says how, and `split` does it.

    Args:
        microbatches: as many as there are to be.
        needs_all: whether there are so many of a batch with fewer samples, too.
        by_elements: lists that hold an element for each sample.
    """

    def __init__(self, microbatches: int, needs_all: bool = False, by_elements: Sequence[Any] = ()):
        self._asked = microbatches
        self._needs_all = needs_all
        self._tensors: dict[tuple[int, int], _Split] = {}  # by id and axis, in their order
        self._sliced: list[str] = []  # that say by themselves how they are split
        self._lists: list[tuple[str, int]] = []  # that hold nothing to split, and their lengths
        self._by_elements = {id(each) for each in by_elements}
        self._pieces = _lamina.Pieces([], microbatches)

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return self._pieces.microbatches

    @property
    def samples(self) -> list[int]:
        """The samples of each microbatch; [] where no tensor is split."""
        return self._pieces.samples

    def look(self, value: Any, axis: int, name: str, is_said: bool, inside: tuple[int, ...] = ()) -> None:
        """Finds what `split` splits in a value.

        Args:
            value, axis, name, inside: see `split`.
            is_said: whether the caller has said of it that it is to be split, and along which axis.

        Errors:
            UsageError: a tensor without that axis, or of a kind that has no pieces; an iterator over batches.
        """
        if id(value) in self._by_elements:
            self._tensors[id(value), 0] = _Split(value, 0, name, len(value), is_said=True)
        elif is_tensor(value):
            if value.ndim > 0 and (id(value), axis) not in self._tensors:
                self._tensors[id(value), axis] = _Split(value, axis, name, _size(value, axis, name), is_said)
        elif callable(getattr(value, "smp_slice", None)):
            self._sliced.append(f"{name} ({type(value).__name__}.smp_slice)")
        elif isinstance(value, PackedSequence):
            raise UsageError(
                f"argument {name} is a PackedSequence, which has no pieces: pass the padded tensor and the lengths and "
                "pack them in the step function, or list the argument in non_split_inputs"
            )
        elif isinstance(value, _READ_ONCE) and self._asked > 1:
            raise UsageError(
                f"argument {name} is a {type(value).__name__}, which the first of {self._asked} microbatches would use "
                "up: read a batch from it in the loop, and call the step function with its tensors",
                code="step-iterator",
            )
        elif id(value) not in inside and (parts := parts_of(value)) is not None:
            found = len(self._tensors), len(self._sliced)
            for label, child in parts[0]:
                self.look(child, axis, name + label, is_said, (*inside, id(value)))
            nothing = found == (len(self._tensors), len(self._sliced))
            if nothing and isinstance(value, (list, tuple)) and len(inside) < 2:
                self._lists.append((name, len(value)))

    def cut(self) -> None:
        """Finds how what was looked at is cut: see [Note: uneven batches] in lamina/pipeline/pieces.h.

        Errors:
            UsageError: a tensor that does not fit beside the others.
        """
        tensors = list(self._tensors.values())
        self._pieces = _lamina.Pieces([tensor.size for tensor in tensors], self._asked, self._needs_all)
        if (misfit := self._pieces.misfit) is not None:
            one, beside = (str(tensors[place]) for place in misfit)
            raise refusal("uneven", one, self._asked, beside, "list the argument in non_split_inputs")

    def split(self, value: Any, axis: int, name: str, inside: tuple[int, ...] = ()) -> list[Any]:
        """One value per microbatch.

        Tensors and numpy arrays are split into pieces, which are views; one that is given twice has the same pieces
        twice. Lists that hold an element for each sample are cut as they are. Other lists, tuples, sets, mappings,
        dataclasses, namespaces and what is registered with torch's pytree are searched for them. An object that has a
        method `smp_slice(num_mb, mb, axis)` is asked for its pieces. Everything else, 0-dimensional tensors too, goes
        to every microbatch as it is.

        Args:
            value: an argument of the step function.
            axis: the axis along which its tensors are split.
            name: what the argument is called in errors.
            inside: the ids of the containers that it is in.
        """
        whole = [value] * self.count
        if id(value) in self._by_elements:
            return self._pieces_of(value, 0, name)
        if is_tensor(value):
            return whole if value.ndim == 0 else self._pieces_of(value, axis, name)
        if callable(smp_slice := getattr(value, "smp_slice", None)):
            distinct = self._pieces.distinct
            pieces = [smp_slice(distinct, microbatch, axis) for microbatch in range(distinct)]
            return pieces + pieces[-1:] * (self.count - distinct)
        parts = None if id(value) in inside else parts_of(value)
        if parts is None:
            return whole
        held, rebuild = parts
        pieces = [self.split(child, axis, name + label, (*inside, id(value))) for label, child in held]
        if all(piece is child for (_, child), split in zip(held, pieces, strict=True) for piece in split):
            return whole
        return [rebuild(list(parts)) for parts in zip(*pieces, strict=True)]

    def require_no_offsets(self) -> None:
        """Refuses what holds offsets into another tensor that was split: see [Note: offsets] in
        lamina/pipeline/offsets.h."""
        sizes = sorted({split.size for split in self._tensors.values()})
        for split in self._tensors.values():
            tensor = split.tensor
            if split.is_said or tensor.ndim != 1 or (_is_array(tensor) and tensor.dtype.kind not in "iu"):
                continue
            held = torch.as_tensor(tensor)
            if _lamina.looks_like_offsets(held, sizes, _OFFSETS.search(split.name) is not None):
                raise refusal(
                    "offsets",
                    str(split),
                    "list the argument in non_split_inputs, with the tensor that it points into, or give an object "
                    "with a method smp_slice(num_mb, mb, axis)",
                    "say so in input_split_axes",
                )

    def summary(self) -> str:
        """Lists what was split, with its axis, and lists of the batch's length that were not; "" if nothing was
        split."""
        tensors = self._tensors.values()
        split = [each.summary() for each in tensors] + self._sliced
        named = ", ".join(split[:_NAMED])
        more = f" and {len(split) - _NAMED} more" if len(split) > _NAMED else ""
        rows = {each.size for each in tensors}
        whole = [f"{name} (a list of {length})" for name, length in self._lists if length in rows]
        return named + more + (f"; whole to each: {', '.join(whole)}" if whole else "")

    def _pieces_of(self, tensor: Any, axis: int, name: str) -> list[Any]:
        split = self._tensors.get((id(tensor), axis))
        if split is None:  # of a container that makes it anew each time
            split = _Split(tensor, axis, name, _size(tensor, axis, name), is_said=True)
        if not split.pieces:
            places = [self._pieces.of(split.size, microbatch) for microbatch in range(self.count)]
            split.pieces = pieces_of(split.tensor, split.axis, places)
        return split.pieces


@dataclass
class _Split:
    """A tensor or an array that is split."""

    tensor: Any
    axis: int
    name: str
    size: int  # along that axis
    is_said: bool
    pieces: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        return f"argument {self.name} {self._kind()}"

    def summary(self) -> str:
        """Its name and shape, and along which axis it is split."""
        if isinstance(self.tensor, (list, tuple)):
            return f"{self.name} ({self.size} samples) by elements"
        return f"{self.name} {tuple(self.tensor.shape)} along axis {self.axis}"

    def _kind(self) -> str:
        is_list = isinstance(self.tensor, (list, tuple))
        return f"with {self.size} samples" if is_list else f"of shape {tuple(self.tensor.shape)}"


def _size(tensor: Any, axis: int, name: str) -> int:
    if isinstance(tensor, torch.Tensor) and (
        tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo)
    ):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            f"argument {name} is a tensor of the kind {kind}, which has no pieces: pass a dense one, or list the "
            "argument in non_split_inputs"
        )
    shape = tuple(tensor.shape)
    if not -len(shape) <= axis < len(shape):
        raise refusal("no-axis", f"argument {name} of shape {shape}", axis)
    return shape[axis]


def pieces_of(tensor: Any, axis: int, places: list[tuple[int, int]]) -> list[Any]:
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


def _is_array(value: Any) -> bool:
    return is_tensor(value) and not isinstance(value, torch.Tensor)


def sample_lists() -> SampleLists:
    """Finds lists of samples in what a Splitter searches."""
    return SampleLists(lambda value: None if _is_opaque(value) or (parts := parts_of(value)) is None else parts[0])


def _is_opaque(value: Any) -> bool:
    return isinstance(value, PackedSequence) or callable(getattr(value, "smp_slice", None))


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
