# SPDX-License-Identifier: Apache-2.0
"""Contents of lists, dictionaries, sets and plain objects, as far as they tell whether somebody has changed them."""

import numbers
import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Content = dict[Any, Any]

_LISTS = (list, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.device, torch.Size)
_LARGE = 1000  # of larger ones only the ends are looked at
_THEIRS = {"torch", "torchvision", "numpy", "transformers", "lamina", "_lamina"} | sys.stdlib_module_names


def is_changeable(value: Any) -> bool:
    """True for a list, a dictionary, a set, or an object of a class of the script's own that is not called."""
    if isinstance(value, (*_LISTS, dict, set, UserDict, UserList, SimpleNamespace)):
        return True
    if isinstance(value, (torch.Tensor, nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return False
    return is_of_the_script(type(value))


def is_of_the_script(made: Any) -> bool:
    """True where a class or function is neither Python's nor of a library that is known."""
    return (getattr(made, "__module__", None) or "torch").partition(".")[0] not in _THEIRS


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


def changed_by_more_than_counting(before: Content, after: Content) -> bool:
    """As `changed`, where a number in the place of a number does not matter."""
    return any(
        (now := after.get(key, _GONE)) != token and not (_is_number(now) and _is_number(token))
        for key, token in before.items()
    )


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
    return list((value if isinstance(value, dict) else vars(value)).items())


def token(value: Any) -> Any:
    """Tells a value from another one that takes its place; numbers and words by what they are."""
    if isinstance(value, numbers.Number):
        return type(value), value
    return value if isinstance(value, str) else id(value)


def _is_number(token: Any) -> bool:
    return isinstance(token, tuple) and token[0] != "size"
