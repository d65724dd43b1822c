# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step function, split into microbatches."""

from typing import Any

import torch

from lamina import nest
from lamina.errors import UsageError


def split(value: Any, count: int, axis: int, name: str) -> list[Any]:
    """One value per microbatch.

    Tensors are split into equal pieces, which are views; lists, tuples, dictionaries and sets are searched for tensors;
    an object that has a method `smp_slice(num_mb, mb, axis)` is asked for its pieces. Everything else, 0-dimensional
    tensors too, goes to every microbatch as it is.

    Args:
        value: an argument of the step function.
        count: the number of microbatches.
        axis: the axis along which its tensors are split.
        name: what the argument is called in errors.

    Errors:
        UsageError: a tensor without that axis, or whose size there is no multiple of `count`.
    """
    if isinstance(value, torch.Tensor):
        return [value] * count if value.dim() == 0 else _split_tensor(value, count, axis, name)
    if callable(smp_slice := getattr(value, "smp_slice", None)):
        return [smp_slice(count, microbatch, axis) for microbatch in range(count)]
    if not isinstance(value, (list, tuple, dict, set, frozenset)) or (held := nest.children(value)) is None:
        return [value] * count
    whole, pieces = [], []
    for label, child in held:
        whole.append(child)
        pieces.append(split(child, count, axis, name + label))
    if all(piece is child for child, split_child in zip(whole, pieces, strict=True) for piece in split_child):
        return [value] * count
    return [nest.rebuild(value, list(parts)) for parts in zip(*pieces, strict=True)]


def _split_tensor(tensor: torch.Tensor, count: int, axis: int, name: str) -> list[torch.Tensor]:
    shape = tuple(tensor.shape)
    if not -tensor.dim() <= axis < tensor.dim():
        raise UsageError(f"argument {name} of shape {shape} has no axis {axis} to split it along")
    size = shape[axis]
    if size % count:
        raise UsageError(
            f"argument {name} of shape {shape} cannot be split into {count} microbatches: its size {size} along axis "
            f"{axis} is not a multiple of {count}. Change the batch size or `microbatches`, or list the argument in "
            "non_split_inputs"
        )
    length = size // count
    pieces = [tensor.narrow(axis, microbatch * length, length) for microbatch in range(count)]
    # A step body may write its piece. Views count the writes to all of the batch together, and autograd would take
    # those of other microbatches for a write to this one.
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]
