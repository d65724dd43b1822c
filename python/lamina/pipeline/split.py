# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step function, split into microbatches."""

import copy
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from lamina import _lamina
from lamina.errors import UsageError, refusal, said
from lamina.util import pytree

_NAMED = 8  # so many tensors are named in a summary
_OFFSETS = re.compile(r"offset|cu_?seq|indptr|row_?ptr|cumulat", re.IGNORECASE)  # in names of cumulative offsets

Parts = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]


class UnevenError(UsageError):
    """A batch that cannot be split evenly."""


class Splitter:
    """Splits the arguments of one call.

    Args:
        count: the number of microbatches.

    Attributes:
        is_said: whether the caller has said of what is split now that it is to be, and along which axis.
    """

    def __init__(self, count: int):
        self._count = count
        self.is_said = False
        self._split: dict[tuple[int, int], tuple[Any, list[Any]]] = {}  # by id and axis: the whole one, and its pieces
        self._sizes: list[str] = []
        self._rows: set[int] = set()
        self._tensors: list[tuple[str, Any, bool]] = []  # names, what they name, and whether to split it was said
        self._lists: list[tuple[str, int]] = []  # that hold nothing to split, and their lengths

    def split(self, value: Any, axis: int, name: str, inside: tuple[int, ...] = ()) -> list[Any]:
        """One value per microbatch.

        Tensors and numpy arrays are split into equal pieces, which are views; one that is given twice has the same
        pieces twice. Lists, tuples, sets, mappings, dataclasses, namespaces and what is registered with torch's pytree
        are searched for them. An object that has a method `smp_slice(num_mb, mb, axis)` is asked for its pieces.
        Everything else, 0-dimensional tensors too, goes to every microbatch as it is.

        Args:
            value: an argument of the step function.
            axis: the axis along which its tensors are split.
            name: what the argument is called in errors.
            inside: the ids of the containers that it is in.

        Errors:
            UsageError: a tensor without that axis, or of a kind that has no pieces; UnevenError, which is one: a size
                there that is no multiple of the number of microbatches.
        """
        whole = [value] * self._count
        if isinstance(value, torch.Tensor) or _is_array(value):
            return whole if value.ndim == 0 else self._pieces_of_tensor(value, axis, name)
        if callable(smp_slice := getattr(value, "smp_slice", None)):
            self._sizes.append(f"{name} ({type(value).__name__}.smp_slice)")
            return [smp_slice(self._count, microbatch, axis) for microbatch in range(self._count)]
        if isinstance(value, PackedSequence):
            raise UsageError(
                f"argument {name} is a PackedSequence, which has no pieces: pass the padded tensor and the lengths and "
                "pack them in the step function, or list the argument in non_split_inputs"
            )
        parts = None if id(value) in inside else _parts(value)
        if parts is None:
            return whole
        held, rebuild = parts
        pieces = [self.split(child, axis, name + label, (*inside, id(value))) for label, child in held]
        if all(piece is child for (_, child), split in zip(held, pieces, strict=True) for piece in split):
            if isinstance(value, (list, tuple)) and len(inside) < 2:
                self._lists.append((name, len(value)))
            return whole
        return [rebuild(list(parts)) for parts in zip(*pieces, strict=True)]

    def require_no_offsets(self) -> None:
        """Refuses what holds offsets into another tensor that was split: see [Note: offsets] in
        lamina/pipeline/offsets.h."""
        for name, tensor, is_said in self._tensors:
            if is_said or tensor.ndim != 1 or (_is_array(tensor) and tensor.dtype.kind not in "iu"):
                continue
            held = torch.as_tensor(tensor)
            if _lamina.looks_like_offsets(held, sorted(self._rows), _OFFSETS.search(name) is not None):
                raise refusal(
                    "offsets",
                    f"argument {name} of shape {tuple(tensor.shape)}",
                    "list the argument in non_split_inputs, with the tensor that it points into, or give an object "
                    "with a method smp_slice(num_mb, mb, axis)",
                    "say so in input_split_axes",
                )

    def summary(self) -> str:
        """Lists what was split, with its axis, and lists of the batch's length that were not; "" if nothing was
        split."""
        named = ", ".join(self._sizes[:_NAMED])
        more = f" and {len(self._sizes) - _NAMED} more" if len(self._sizes) > _NAMED else ""
        whole = [f"{name} (a list of {length})" for name, length in self._lists if length in self._rows]
        return named + more + (f"; whole to each: {', '.join(whole)}" if whole else "")

    def _pieces_of_tensor(self, tensor: Any, axis: int, name: str) -> list[Any]:
        key = (id(tensor), axis)
        if key not in self._split:
            self._split[key] = (tensor, _cut(tensor, self._count, axis, name))
            shape = tuple(tensor.shape)
            self._sizes.append(f"{name} {shape} along axis {axis}")
            self._rows.add(shape[axis])
            self._tensors.append((name, tensor, self.is_said))
        return self._split[key][1]


def _cut(tensor: Any, count: int, axis: int, name: str) -> list[Any]:
    is_tensor = isinstance(tensor, torch.Tensor)
    if is_tensor and (tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo)):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            f"argument {name} is a tensor of the kind {kind}, which has no pieces: pass a dense one, or list the "
            "argument in non_split_inputs"
        )
    shape = tuple(tensor.shape)
    if not -len(shape) <= axis < len(shape):
        raise refusal("no-axis", f"argument {name} of shape {shape}", axis)
    size = shape[axis]
    if size % count:
        whole = "list the argument in non_split_inputs"
        raise UnevenError(said("uneven", f"argument {name} of shape {shape}", count, size, axis, count, whole))
    length = size // count
    if not is_tensor:
        before = (slice(None),) * (axis % len(shape))
        return [tensor[(*before, slice(first * length, (first + 1) * length))] for first in range(count)]
    if tensor.layout != torch.strided:
        return [tensor.narrow_copy(axis, microbatch * length, length) for microbatch in range(count)]
    pieces = [tensor.narrow(axis, microbatch * length, length) for microbatch in range(count)]
    # A step body may write its piece. Views count the writes to all of the batch together, and autograd would take
    # those of other microbatches for a write to this one.
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _parts(value: Any) -> Parts | None:
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
