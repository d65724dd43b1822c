# SPDX-License-Identifier: Apache-2.0
"""Arguments that a module on another rank has changed: what became of its copies becomes of the caller's objects.

[Note: changes] Lists, dictionaries and objects reach another rank as copies. Containers that the module changed come
back with its result, and the caller's are made equal to them: the same objects as before, with other content. This goes
on over several ranks. Such a call is waited for. While an object is with one call, no other may change it.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.job import codec
from lamina.script_state.content import same
from lamina.script_state.holders import holders_of
from lamina.util import pytree

_MAY_BE_EMPTY = (list, deque, dict, set, nn.Module)

Position = int | str  # of an argument: among those without a keyword, or its keyword


@dataclass
class CallResult:
    """A result, and the arguments that changed on the way to it."""

    output: Any
    arguments: dict[Position, Any]

    def packed(self) -> tuple["_Packed", list[torch.Tensor]]:
        """A container as it travels: all in one, so that one object here is one on the other side. Its tensors go for
        themselves, so that those of the caller are known there as the caller's and do not travel."""
        data, tensors = codec.pack((self.output, self.arguments))
        return _Packed(data), tensors


@dataclass
class _Packed:
    data: bytes


def unpacked(result: Any) -> CallResult | None:
    """Returns what arrived of a `CallResult`; None for any other result."""
    if type(result) is not tuple or len(result) != 2 or type(result[0]) is not _Packed:
        return None
    return CallResult(*codec.unpack(result[0].data, result[1]))


class BorrowedArguments:
    """The objects that are with calls of other ranks' modules."""

    def __init__(self):
        self._lock = threading.Lock()
        self._calls: Counter[int] = Counter()  # that have it, by the id of an object

    @contextmanager
    def lend(self, values: list[Any]) -> Iterator[None]:
        """Inside, a call has these."""
        with self._lock:
            self._calls.update(map(id, values))
        try:
            yield
        finally:
            with self._lock:
                self._calls -= Counter(map(id, values))

    def has_several_borrowers(self, value: Any) -> bool:
        """True where more than one call has it."""
        with self._lock:
            return self._calls[id(value)] > 1


def write_back(changed: CallResult, args: tuple, kwargs: dict[str, Any], borrowed: BorrowedArguments) -> Any:
    """Makes the caller's arguments equal to the changed ones; returns the result.

    Errors:
        UsageError: an argument that cannot be changed in place, or that another call has at the same time.
    """
    written: dict[int, Any] = {}  # by id of what came back: the caller's
    for position, new in changed.arguments.items():
        old = args[position] if isinstance(position, int) else kwargs[position]
        if borrowed.has_several_borrowers(old):
            raise UsageError(
                f"its argument {position!r} was changed by one call while another, of the same step, had it: no order "
                "of the microbatches is kept here; give each microbatch an object of its own",
                code="step-argument-shared",
            )
        if _written_back(old, new, written) is not old:
            raise UsageError(
                f"its argument {position!r}, of type {type(old).__qualname__}, was changed on another rank in a way "
                "that cannot be repeated here: return what changes, or place both on one partition",
                code="step-argument-changed",
            )
    return pytree.map_values(lambda part: written.get(id(part)), changed.output)


def _written_back(old: Any, new: Any, written: dict[int, Any]) -> Any:
    """Returns what stands for `new` here: `old` with its content, or where that is impossible `new` itself."""
    if id(new) in written:
        return written[id(new)]
    if old is new or type(old) is not type(new) or isinstance(new, (torch.Tensor, type)):
        return new
    if isinstance(new, tuple):
        return _written_back_tuple(old, new, written)
    written[id(new)] = old
    if isinstance(new, bytearray):
        old[:] = new
    elif hasattr(new, "__array_interface__") and old.shape == new.shape:
        old[...] = new
    elif not isinstance(new, _MAY_BE_EMPTY) and not any(holder.content() for holder in holders_of(new)):
        del written[id(new)]
        return new
    for here, there in zip(holders_of(old), holders_of(new), strict=True):
        before, after = here.content(), there.content()
        written_back = {key: _written_back(before[key], after[key], written) for key in after.keys() & before.keys()}
        here.put({key: written_back.get(key, value) for key, value in after.items()})
    return old


def _written_back_tuple(old: tuple, new: tuple, written: dict[int, Any]) -> tuple:
    if len(old) != len(new):
        return new
    parts = [_written_back(*pair, written) for pair in zip(old, new, strict=True)]
    if all(map(same, old, parts)):
        return old
    return pytree.rebuild(new, parts)
