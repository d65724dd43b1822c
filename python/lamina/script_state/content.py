# SPDX-License-Identifier: Apache-2.0
"""Contents of containers, objects, arrays and generators, as far as they tell whether somebody has changed them.

Numbers and words count by what they are, tensors by their writes, anything else by which object it is.
"""

import argparse
import array
import functools
import gc
import itertools
import numbers
import operator
import pickle
import queue
import random
import threading
import weakref
import zlib
from collections import UserList, deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from types import FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lamina.script_state.generators import generator
from lamina.script_state.holders import Content, holders_of
from lamina.script_state.kinds import LARGE, PLAIN, RUNNING, is_of_the_script, slots_of

_SETS = (set, weakref.WeakSet)
_SPACES = (SimpleNamespace, argparse.Namespace, threading.local, threading.Event, queue.Queue)
_BYTES = (bytearray, array.array)
_CACHE = functools._lru_cache_wrapper
_GENERATORS = (torch.Generator, random.Random, *RUNNING)
_CHANGEABLE = (list, deque, MutableMapping, *_SETS, UserList, *_SPACES, *_BYTES, *_GENERATORS, _CACHE)
_OTHERWISE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, functools.partial)  # what is watched elsewhere
_LARGEST = 20_000  # elements; larger lists are looked at by their ends alone
_LARGE_BYTES = 1 << 20  # of larger arrays every so many bytes
_MOST = 1000  # objects in one
_GONE = object()


def is_changeable(value: Any) -> bool:
    """True for a container, an array, a generator of random numbers, an iterator, or an object of a class of the
    script's own. A tuple counts where it has one of these, or a tensor."""
    if isinstance(value, tuple):
        return any(is_plain_tensor(part) or is_changeable(part) for part in value)
    return _can_change(type(value))


@functools.lru_cache(10_000)
def _can_change(kind: type) -> bool:
    if issubclass(kind, _OTHERWISE):
        return False
    has_parts = kind.__dictoffset__ != 0 or bool(slots_of(kind))
    return issubclass(kind, _CHANGEABLE) or _is_numpys(kind) or (is_of_the_script(kind) and has_parts)


def is_generator(value: Any) -> bool:
    """True for a generator of random numbers, or an iterator: what each use changes."""
    return isinstance(value, _GENERATORS) or (_is_numpys(type(value)) and not _is_array(value))


def is_plain_tensor(value: Any) -> bool:
    """True for a tensor that may be written in place by whoever has it: neither a parameter nor part of a graph."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    return not value.requires_grad or value.is_leaf


def same(old: Any, new: Any) -> bool:
    """True where putting `new` in the place of `old` changes nothing."""
    return old is new or (type(old) is type(new) and isinstance(new, PLAIN) and old == new)


def within(value: Any) -> list[Any]:
    """`value` and what is in it, as far as it is changeable."""
    return [each for _, each, _ in _walk(value)]


def tensors_within(objects: list[Any]) -> list[torch.Tensor]:
    """Tensors that may be written in place, in what `within` gave."""
    return [part for each in objects for _, part in _items(each) if is_plain_tensor(part)]


def modules_within(value: Any) -> list[nn.Module]:
    """Modules in lists, dictionaries and objects."""
    return [part for _, _, items in _walk(value) for _, part in items if isinstance(part, nn.Module)]


def whole_of(value: Any) -> Any:
    """The array that a view of one is of, with whose other views it changes; else `value`."""
    while _is_numpys(type(value)) and _is_numpys(type(getattr(value, "base", None))):
        value = value.base
    return value


def memory_of(tensor: torch.Tensor) -> int:
    """Names what tensors in one memory have in common."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if isinstance(tensor, FakeTensor) or tensor.is_meta else storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # it has several, or none
        return id(tensor)


def content(value: Any, known: Collection[int] = ()) -> Content:
    """Equal as long as nobody has changed `value` or what is within it, but for objects with the ids `known` and what
    is within these."""
    found = {}
    for path, each, items in _walk(value, known):
        found.update(((path, key), token(part)) for key, part in items)
        if isinstance(each, (list, deque)):
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
    for path, each, _ in list(_walk(value)):
        for (where, key), (_, number) in numbers_of.items():
            if where != path:
                continue
            if isinstance(each, (list, deque)) or (isinstance(each, MutableMapping) and key in each):
                each[key] = number
            else:
                setattr(each, key, number)


def _walk(value: Any, known: Collection[int] = ()) -> Iterator[tuple[tuple, Any, list[tuple[Any, Any]]]]:
    """`value` and all that is in it, each once, where it is changeable and not known: where it was found, itself, what
    it has."""
    ahead, seen = deque([((), value)] if is_changeable(value) else []), {id(value)}
    while ahead:
        path, each = ahead.popleft()
        items = _items(each)
        yield path, each, items
        for key, part in items:
            if len(seen) < _MOST and id(part) not in seen and id(part) not in known and is_changeable(part):
                seen.add(id(part))
                ahead.append(((*path, key), part))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (*_BYTES, *_GENERATORS)) or _is_numpys(type(value)):
        return [("state", _Sum(_state(value)))]
    if isinstance(value, (list, deque)) and len(value) > LARGE:
        ids = array.array("Q", map(id, value if len(value) <= _LARGEST else ()))
        return [(0, value[0]), (len(value) - 1, value[-1]), ("state", _Sum(ids.tobytes()))]
    if isinstance(value, _SETS):
        return [(token(each), True) for each in value]
    if isinstance(value, _CACHE):
        return [(id(each), each) for each in gc.get_referents(value) if each is not vars(value)]
    if isinstance(value, tuple):
        items = list(enumerate(value))
    else:
        items = list(value.items()) if isinstance(value, MutableMapping) and not isinstance(value, dict) else []
    return items + [each for holder in holders_of(value) for each in holder.content().items()]


class _Sum:
    """A checksum; no number that counts."""

    def __init__(self, data: bytes | memoryview):
        self.token = "sum", zlib.crc32(data)


def _state(value: Any) -> bytes | memoryview:
    """Bytes that differ when it has changed."""
    if (source := generator("", value)) is not None:
        with _disable_current_modes():  # a trace's, in which a state has no value
            return pickle.dumps(source.get())
    if isinstance(value, RUNNING):
        return _state_of_iterator(value).encode()
    if isinstance(value, _BYTES):
        return memoryview(value).cast("B")
    if not _is_array(value):  # the system's random numbers have no state
        return b""
    if value.dtype.hasobject:
        return repr([id(each) for each in value.flat[:LARGE]]).encode()
    step = max(1, value.nbytes // _LARGE_BYTES)
    return value.reshape(-1)[::step].tobytes()


def _state_of_iterator(value: Any) -> str:
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held = {} if frame is None else frame.f_locals
        return repr((frame and frame.f_lasti, [(name, token(each)) for name, each in held.items()]))
    _, arguments, *state = value.__reduce__()
    left = [operator.length_hint(each, 0) for each in arguments]
    parts = [part for each in state for part in (each if isinstance(each, tuple) else (each,))]
    return repr((left, [part if isinstance(part, int) else operator.length_hint(part, 0) for part in parts]))


def _is_numpys(kind: type) -> bool:
    names = ("ndarray", "memmap", "matrix", "Generator", "RandomState")
    return kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in names


def _is_array(value: Any) -> bool:
    return type(value).__name__ in ("ndarray", "memmap", "matrix")


def version_of(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor; 0 for one of inference mode, of which torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


def token(value: Any) -> Any:
    """Tells a value from another one that takes its place; numbers and words by what they are, tensors that may be
    written in place by how often that was done."""
    if type(value) in (int, float, bool) or isinstance(value, numbers.Number):
        return type(value), value
    if isinstance(value, _Sum):
        return value.token
    if is_plain_tensor(value):
        return "tensor", id(value), version_of(value)
    return value if isinstance(value, str) else id(value)


def _is_number(token: Any) -> bool:
    return isinstance(token, tuple) and isinstance(token[0], type)
