# SPDX-License-Identifier: Apache-2.0
"""Contents of lists, dictionaries, sets, arrays, generators and plain objects, as far as they tell whether somebody has
changed them."""

import argparse
import array
import functools
import itertools
import numbers
import pickle
import random
import sys
import threading
import zlib
from collections import UserList, deque
from collections.abc import Callable, Iterator, MutableMapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

Content = dict[Any, Any]

_LISTS = (list, deque)
_SPACES = (SimpleNamespace, argparse.Namespace, threading.local)
_BYTES = (bytearray, array.array)
_GENERATORS = (torch.Generator, random.Random, itertools.count)
_FUNCTIONS = (FunctionType, MethodType, functools.partial, functools._lru_cache_wrapper)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.device, torch.Size)
_LARGE = 1000  # of larger ones only the ends are looked at
_LARGE_BYTES = 1 << 16  # of larger arrays every so many bytes
THEIRS = {"torch", "torchvision", "numpy", "transformers", "lamina", "_lamina"} | sys.stdlib_module_names


def is_changeable(value: Any) -> bool:
    """True for a list, a dictionary, a set, an array, a generator of random numbers, or an object of a class of the
    script's own."""
    if isinstance(value, (torch.Tensor, nn.Module)):
        return False
    if isinstance(value, (*_LISTS, MutableMapping, set, UserList, *_SPACES, *_BYTES, *_GENERATORS)):
        return True
    if isinstance(value, (type, *_FUNCTIONS)):
        return False
    return _is_numpys(value) or (is_of_the_script(type(value)) and (hasattr(value, "__dict__") or bool(_slots(value))))


def is_generator(value: Any) -> bool:
    """True for a generator of random numbers, or another one that each use changes."""
    return isinstance(value, _GENERATORS) or (_is_numpys(value) and not _is_array(value))


def is_plain_tensor(value: Any) -> bool:
    """True for a tensor that may be written in place by whoever has it: neither a parameter nor part of a graph."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def is_of_the_script(made: Any) -> bool:
    """True where a class or function is neither Python's nor of a library that is known."""
    return (getattr(made, "__module__", None) or "torch").partition(".")[0] not in THEIRS


def same(old: Any, new: Any) -> bool:
    """True where putting `new` in the place of `old` changes nothing."""
    return old is new or (type(old) is type(new) and isinstance(new, _PLAIN) and old == new)


def within(value: Any) -> list[Any]:
    """`value` and what is in it, as far as it is changeable."""
    return [each for _, each in _walk(value)]


def content(value: Any) -> Content:
    """Equal as long as nobody has changed `value` or what is within it."""
    found = {}
    for path, each in _walk(value):
        found |= {(path, key): token(part) for key, part in _items(each)}
        if isinstance(each, _LISTS):
            found[path, "size"] = ("size", len(each))
    return found


def changed(before: Content, after: Content) -> bool:
    """True where something was replaced or taken away, or a list has grown. What was put into a dictionary is no change
    until it is replaced: so caches are filled, on each rank for itself."""
    return any(after.get(key, _GONE) != token for key, token in before.items())


def changed_by_more_than_counting(
    before: Content, after: Content, counts: Callable[[Any], bool] = lambda _: True
) -> bool:
    """As `changed`, where a number in the place of a number does not matter if `counts` says so of its key."""
    return any(
        (now := after.get(key, _GONE)) != token and not (_is_number(now) and _is_number(token) and counts(key[1]))
        for key, token in before.items()
    )


def put_numbers(value: Any, numbers_of: Content) -> None:
    """Puts numbers back where `content` found them in `value`, which has others there now."""
    for path, each in list(_walk(value)):
        for (where, key), (_, number) in numbers_of.items():
            if where != path:
                continue
            if isinstance(each, _LISTS) or (isinstance(each, MutableMapping) and key in each):
                each[key] = number
            else:
                setattr(each, key, number)


_GONE = object()


def _walk(value: Any, path: tuple = (), depth: int = 3) -> Iterator[tuple[tuple, Any]]:
    if is_changeable(value):
        yield path, value
        if depth:
            for key, part in _items(value):
                yield from _walk(part, (*path, key), depth - 1)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, _LISTS):
        if len(value) > _LARGE:
            return [(0, value[0]), (len(value) - 1, value[-1])]
        return list(enumerate(value))
    if isinstance(value, set):
        return [(token(each), True) for each in value]
    if isinstance(value, (*_BYTES, *_GENERATORS)) or _is_numpys(value):
        return [("state", _Sum(_state(value)))]
    items = list(value.items()) if isinstance(value, MutableMapping) else []
    return (
        items + [(name, getattr(value, name)) for name in _slots(value)] + list(getattr(value, "__dict__", {}).items())
    )


class _Sum:
    """A checksum; no number that counts."""

    def __init__(self, data: bytes | memoryview):
        self.token = "sum", zlib.crc32(data)


def _state(value: Any) -> bytes | memoryview:
    """Bytes that differ when it has changed."""
    if isinstance(value, torch.Generator):
        with _disable_current_modes():  # a trace's, in which a state has no value
            return value.get_state().numpy().tobytes()  # in memory of the host, of whatever device it is
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, itertools.count):
        return repr(value).encode()
    if isinstance(value, _BYTES):
        return memoryview(value).cast("B")
    if not _is_array(value):
        generator = getattr(value, "bit_generator", None)
        return pickle.dumps(value.get_state() if generator is None else generator.state)
    if value.dtype.hasobject:
        return repr([id(each) for each in value.flat[:_LARGE]]).encode()
    step = max(1, value.nbytes // _LARGE_BYTES)
    return value.reshape(-1)[::step].tobytes()


def _is_numpys(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and (
        _is_array(value) or type(value).__name__ in ("Generator", "RandomState")
    )


def _is_array(value: Any) -> bool:
    return type(value).__name__ in ("ndarray", "memmap", "matrix")


def _slots(value: Any) -> list[str]:
    """Names of what it has in slots."""
    given = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in given for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def version_of(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor; 0 for one of inference mode, of which torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


def token(value: Any) -> Any:
    """Tells a value from another one that takes its place; numbers and words by what they are, tensors that may be
    written in place by how often that was done."""
    if isinstance(value, numbers.Number):
        return type(value), value
    if isinstance(value, _Sum):
        return value.token
    if is_plain_tensor(value):
        return "tensor", id(value), version_of(value)
    return value if isinstance(value, str) else id(value)


def _is_number(token: Any) -> bool:
    return isinstance(token, tuple) and isinstance(token[0], type)
