# SPDX-License-Identifier: Apache-2.0
"""Contents of variables, as far as two runs can be compared by them."""

import hashlib
import itertools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextvars import ContextVar
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lamina.script_state.content import is_generator
from lamina.script_state.generators import generator
from lamina.script_state.kinds import attributes_of

_MOST = 2000  # values in one variable
_DEEPEST = 6
_LARGEST = 1 << 26  # elements of tensors that are looked at
_LONGEST = 40  # characters of a value that is said
_UNTOLD = (FunctionType, MethodType, ModuleType, nn.Module, type)  # they are named, not looked into


class Contents:
    """The contents of a variable.

    Attributes:
        text: they in words, where these are few, else "#" and a hash; without numbers that may differ by rounding.
        tensors: those numbers.
    """

    def __init__(self, value: Any):
        self.tensors: list[torch.Tensor] = []
        self._floats: list[float] = []
        self._seen: set[int] = set()
        self._left = _MOST
        text = "".join(self._parts(value, _DEEPEST))
        is_short = len(text) <= _LONGEST and text.isprintable() and not text.startswith("#")
        self.text = text if is_short else "#" + hashlib.sha1(text.encode(errors="replace")).hexdigest()
        if self._floats:
            self.tensors.append(torch.tensor(self._floats, dtype=torch.float64))

    def _parts(self, value: Any, depth: int) -> Iterator[str]:
        self._left -= 1
        if isinstance(value, ContextVar):
            value = value.get(None)
        if type(value).__module__ == "numpy" and hasattr(value, "item") and type(value).__name__ != "ndarray":
            value = value.item()
        if isinstance(value, torch.Tensor):
            if value.numel() <= _LARGEST:
                self.tensors.append(value.detach())
            yield "a tensor"
        elif isinstance(value, float):
            self._floats.append(value)
            yield "a number"
        elif value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.device)):
            yield repr(value)
        elif isinstance(value, _UNTOLD):
            yield getattr(value, "__qualname__", type(value).__qualname__)
        elif is_generator(value):
            yield "#" + _state_of(value)
        elif id(value) in self._seen or self._left <= 0 or depth == 0:
            yield "..."
        else:
            self._seen.add(id(value))
            yield from self._within(value, depth - 1)

    def _within(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, (list, tuple, deque)):
            yield "["
            for each in value:
                yield from (*self._parts(each, depth), ", ")
            yield "]"
        elif isinstance(value, Mapping):
            yield from self._named(value.items(), depth)
        elif isinstance(value, Set):
            yield repr(sorted(map(repr, value)))
        elif type(value).__name__ == "ndarray":
            yield from self._array(value)
        else:
            yield type(value).__qualname__
            yield from self._named(attributes_of(value).items(), depth)

    def _named(self, items: Any, depth: int) -> Iterator[str]:
        yield "{"
        for key, each in list(items):
            yield from ("key" if _is_by_identity(key) else repr(key), ": ", *self._parts(each, depth), ", ")
        yield "}"

    def _array(self, value: Any) -> Iterator[str]:
        try:
            self.tensors.append(torch.from_numpy(value.copy()))
            yield "an array"
        except TypeError:  # of objects
            yield f"an array of {value.size}"


def _state_of(value: Any) -> str:
    """A hash of where a generator of random numbers, or an iterator, is."""
    if (source := generator("", value)) is not None:
        state = source.get()
    elif isinstance(value, GeneratorType):
        state = value.gi_frame and value.gi_frame.f_lasti
    else:
        state = value if isinstance(value, itertools.count) else operator.length_hint(value, 0)
    return hashlib.sha1(repr(state).encode()).hexdigest()


def _is_by_identity(key: Any) -> bool:
    """True for a key whose text has its address."""
    return type(key).__repr__ is object.__repr__ or isinstance(key, (FunctionType, nn.Module, torch.Tensor))
