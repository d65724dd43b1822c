# SPDX-License-Identifier: Apache-2.0
"""Everything that functions and objects of a script can reach and change, as it is now, and how it is put back.

Functions reach names of their closures, default arguments, and the global names in their code; objects and modules
their attributes, and of their classes the functions whose names some reached function has in its code. So a global name
that no such function has is left alone, whoever changes it meanwhile.
"""

import copy
import functools
import queue
import sys
import threading
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from lamina.script_state.generators import Source, generator
from lamina.script_state.holders import (
    Attributes,
    Block,
    Cache,
    Cell,
    ClassAttributes,
    Content,
    Holder,
    Names,
    holders_of,
    is_same,
)
from lamina.script_state.kinds import ASIDE, ITERATORS, LARGE, PLAIN, codes, is_torchs

_MOST = 300_000
_BLOCK = 32  # holders that are compared at once
_LARGE_BYTES = 1 << 24
HOLDERS = (UserDict, UserList, SimpleNamespace, threading.local, threading.Event, queue.Queue)
HOLDERS += (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
_WRAPPERS += (functools.partial, functools.partialmethod, MethodType)
_FUNCTIONS = (FunctionType, *_WRAPPERS)


class Reach:
    """A walk through all that can be reached from some objects, and its contents then.

    Args:
        roots: (name, object), where one begins; names are for messages.
        follow: whether an object is looked into; None for all.
        most: how many objects are looked at, or ten times as many parts of them; those nearest to where it begins.

    Attributes:
        tensors, arrays, sources: met on the way, in its order.
        is_whole: whether there were no more than that.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], follow: Callable[[Any], bool] | None = None, most: int = _MOST
    ):
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.sources: list[Source] = []
        self._follow = follow or (lambda _: True)
        self._holders: list[tuple[Holder, Content]] = []
        self._blocks: list[Block | None] = []  # of these
        self._names: list[str] = []
        self._seen: dict[int, Any] = {}  # kept, so that ids stay theirs
        self._globals: set[tuple[int, str]] = set()
        self._used: set[str] = {"forward"}  # names in the code of functions
        self._unused: dict[str, list[tuple[str, Any]]] = {}  # functions of classes by names that are not among them
        self._copies: dict[int, Any] = {}  # of iterators, by id
        self._states: list[Callable[[], None]] = []  # put back what is no holder
        self._running: list[tuple[str, GeneratorType, Any]] = []  # generator functions, and where they are
        given = list(roots)
        names = {id(root): name for name, root in given}
        self._ahead = deque(given)
        self._pushed = 0
        while self._ahead and len(self._seen) + self._pushed // 10 < most:  # a part costs a tenth of an object
            name, value = self._ahead.popleft()
            if not isinstance(value, PLAIN) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if self._follow(value):
                    self._visit(names.get(id(value), name), value)
        self.is_whole = not self._ahead
        self._seen.clear()
        self._unused.clear()

    @property
    def is_repeatable(self) -> bool:
        """True where `restore()` may be called several times: nothing goes on by itself."""
        return not self._copies and not self._running

    def restore(self) -> None:
        """Makes everything what it was."""
        for holder, before in self._holders:
            wanted = {key: self._copies.get(id(value), value) for key, value in before.items()}
            if not is_same(holder.content(), wanted):
                holder.put(wanted)
        for put_back in self._states:
            put_back()

    def advanced(self) -> list[str]:
        """Returns the names of generator functions that have gone on since, which nobody can put back."""
        return [name for name, running, before in self._running if _position(running) != before]

    def holders(self) -> Iterator[tuple[str, Holder]]:
        """Yields each with its name, in an order that is the same wherever the same objects were made."""
        return zip(self._names, (holder for holder, _ in self._holders), strict=True)

    def changed(self) -> Iterator[tuple[str, Holder, Content, Content]]:
        """Yields each holder that holds other things than before: its name, itself, its contents before and now."""
        return ((self._names[number], *self._holders[number], now) for number, now in self._changed())

    def refresh(self) -> bool:
        """Takes what is now for what was before, where only plain values have come and gone since. False where another
        walk would find other things."""
        changed = list(self._changed())
        for number, now in changed:
            before = self._holders[number][1]
            moved = (
                each.get(key)
                for key in before.keys() | now.keys()
                for each in (before, now)
                if before.get(key, self) is not now.get(key, self)
            )
            if not all(isinstance(value, PLAIN) for value in moved):
                return False
        for number, now in changed:
            self._holders[number] = self._holders[number][0], now
            self._blocks[number // _BLOCK] = None
        return True

    def _changed(self) -> Iterator[tuple[int, Content]]:
        """Yields the numbers of holders that hold other things than before, and what they hold now."""
        for place, first in enumerate(range(0, len(self._holders), _BLOCK)):
            held = self._holders[first : first + _BLOCK]
            if place == len(self._blocks):
                self._blocks.append(None)
            block = self._blocks[place] = self._blocks[place] or Block(held)
            for at in block.slow if block.is_same() else range(len(held)):
                if not is_same(now := held[at][0].content(), held[at][1]):
                    yield first + at, now

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, (tuple, frozenset)):
            self._push((f"{name}[{place}]", part) for place, part in enumerate(value) if len(value) <= LARGE)
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, CellType):
            self._hold(name, Cell(value))
        elif isinstance(value, type):
            if not is_torchs(value):
                self._visit_class(value)
            self._push((each.__qualname__, each) for each in value.__bases__)
        elif isinstance(value, _WRAPPERS):
            if kind is functools._lru_cache_wrapper:
                self._hold(name, Cache(value))
            names = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset")
            self._push((name, getattr(value, each, None)) for each in names)
        elif isinstance(value, ITERATORS):
            self._copy(value)
        elif isinstance(value, GeneratorType):
            self._running.append((name, value, _position(value)))
        elif (source := _source(name, value)) is not None:
            self._states.append(functools.partial(source.put, source.get()))
            if hasattr(value, "__array_interface__"):
                self.arrays.append(value)
            else:
                self.sources.append(source)
        else:
            self._visit_object(name, value)

    def _visit_object(self, name: str, value: Any) -> None:
        """Parts of a container, and attributes of modules and of objects that belong to the script or hold things of
        it."""
        kind = type(value)
        has_attributes = isinstance(value, (nn.Module, *HOLDERS)) or not is_torchs(kind)
        if has_attributes or isinstance(value, (dict, list, deque, set)):
            for holder in holders_of(value):
                if has_attributes or not isinstance(holder, Attributes):
                    self._hold(name, holder)
        if has_attributes:
            self._push([(kind.__qualname__, kind)])

    def _visit_class(self, kind: type) -> None:
        self._hold(kind.__qualname__, holder := ClassAttributes(kind), follow=False)
        for key, value in holder.content().items():
            found = holder.path(kind.__qualname__, key), value
            is_special = key.startswith("__") and key.endswith("__")
            if not isinstance(value, _FUNCTIONS):
                self._push([found])
            elif is_special:
                if key not in ASIDE and not (key == "__init__" and issubclass(kind, nn.Module)):
                    self._push([found])
            elif key in self._used:
                self._push([found])
            else:
                self._unused.setdefault(key, []).append(found)

    def _use(self, names: set[str]) -> None:
        for name in sorted(names - self._used):
            self._push(self._unused.pop(name, ()))
        self._used |= names

    def _visit_function(self, name: str, function: FunctionType) -> None:
        is_inside = is_torchs(function.__globals__.get("__name__", ""))  # a decorator's, maybe
        if is_inside and is_torchs(function):
            return
        code = function.__code__
        self._push(zip(code.co_freevars, function.__closure__ or (), strict=True))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._push((f"a default argument of {function.__qualname__}", each) for each in defaults)
        self._hold(function.__qualname__, Attributes(function))
        if is_inside:
            return
        used = sorted({each for every in codes(code) for each in every.co_names})
        words = {each for every in codes(code) for each in every.co_consts if isinstance(each, str)}
        self._use(set(used) | {each for each in words if each.isidentifier()})
        self._hold_names(function.__globals__, used)
        for value in [function.__globals__.get(each) for each in used]:
            if isinstance(value, ModuleType) and not is_torchs(value):
                self._hold_names(vars(value), used)

    def _hold_names(self, names: dict[str, Any], used: list[str]) -> None:
        fresh = [each for each in used if (id(names), each) not in self._globals]
        self._globals.update((id(names), each) for each in fresh)
        if fresh:
            self._hold(names.get("__name__", ""), Names(names, fresh))

    def _hold(self, name: str, holder: Holder, follow: bool = True) -> None:
        content = holder.content()
        self._holders.append((holder, content))
        self._names.append(name)
        if follow and (len(content) <= LARGE or isinstance(holder, Attributes)):
            self._push((holder.path(name, key), value) for key, value in content.items())

    def _push(self, found: Iterable[tuple[str, Any]]) -> None:
        fresh = [(name, value) for name, value in found if not isinstance(value, PLAIN)]
        self._pushed += len(fresh)
        self._ahead.extend(fresh)

    def _copy(self, iterator: Any) -> None:
        try:
            self._copies[id(iterator)] = copy.copy(iterator)
        except Exception:  # some cannot be copied: they go on from where they are
            return
        self._states.append(functools.partial(lambda _: None, iterator))  # kept, so that its id stays its own


def _position(running: GeneratorType) -> Any:
    frame = running.gi_frame
    return None if frame is None else (frame.f_lasti, [id(each) for each in frame.f_locals.values()])


def _source(name: str, value: Any) -> Source | None:
    """Returns how the state of an array or of a generator is read and set; None for anything else."""
    kind, numpy = type(value).__name__, sys.modules.get("numpy")
    if isinstance(value, bytearray):
        return Source(name, kind, lambda: bytes(value), functools.partial(value.__setitem__, slice(None)))
    is_array = numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))
    if is_array and value.flags.writeable and value.nbytes <= _LARGE_BYTES:
        return Source(name, kind, value.copy, functools.partial(value.__setitem__, ...))
    return generator(name, value)
