# SPDX-License-Identifier: Apache-2.0
"""Everything that functions and objects of a script can reach and change, as it is now, and how it is put back.

Functions reach names of their closures, default arguments, and the global names in their code; objects and modules
their attributes, and of their classes the functions whose names some reached function has in its code. So a global name
that no such function has is left alone, whoever changes it meanwhile.
"""

import copy
import functools
import gc
import itertools
import queue
import random
import sys
import threading
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MISSING = object()

Content = dict[Any, Any]  # what a holder has, by name, key, or place

_LARGE = 1000  # containers of more are kept as they are, what is in their elements is not looked at
_MOST = 300_000
_LARGE_BYTES = 1 << 24
_THEIRS = {"torch", "numpy", "lamina", "_lamina", "triton"} | set(sys.stdlib_module_names)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_HOLDERS = (UserDict, UserList, SimpleNamespace, threading.local, threading.Event, queue.Queue)
_HOLDERS += (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
ITERATORS = (itertools.count, itertools.cycle, *(type(iter(made)) for made in ([], (), range(0), {}.values(), "")))
_HIDDEN = ("__dict__", "__weakref__")
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
_WRAPPERS += (functools.partial, functools.partialmethod, MethodType)
_FUNCTIONS = (FunctionType, *_WRAPPERS)
# Nothing that runs in a call has their names.
_ASIDE = {"__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"}
_ASIDE |= {"__copy__", "__dir__", "__init_subclass__", "__class_getitem__"}


@dataclass(frozen=True)
class Source:
    """A source of random numbers, or bytes: what has a state and holds no objects.

    Attributes:
        name: for messages.
        kind: the name of its class.
        get, put: read its state, and set it.
    """

    name: str
    kind: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


class Reach:
    """A walk through all that can be reached from some objects, and its contents then.

    Args:
        roots: (name, object), where one begins; names are for messages.
        follow: whether an object is looked into; None for all.
        most: how many objects are looked at.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], follow: Callable[[Any], bool] | None = None, most: int = _MOST
    ):
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.sources: list[Source] = []
        self._follow = follow or (lambda _: True)
        self._holders: list[tuple[Holder, Content]] = []
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
        self._ahead = given[::-1]
        while self._ahead and len(self._seen) < most:
            name, value = self._ahead.pop()
            if not isinstance(value, _PLAIN) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if self._follow(value):
                    self._visit(names.get(id(value), name), value)
        self._seen.clear()
        self._unused.clear()

    def restore(self) -> None:
        """Makes everything what it was."""
        for holder, before in self._holders:
            wanted = {key: self._copies.get(id(value), value) for key, value in before.items()}
            if not _is_same(holder.content(), wanted):
                holder.put(wanted)
        for put_back in self._states:
            put_back()

    def advanced(self) -> list[str]:
        """Returns the names of generator functions that have gone on since, which nobody can put back."""
        return [name for name, running, before in self._running if _position(running) != before]

    def holders(self) -> Iterator[tuple[str, "Holder"]]:
        """Yields each with its name, in an order that is the same wherever the same objects were made."""
        return zip(self._names, (holder for holder, _ in self._holders), strict=True)

    def changed(self) -> Iterator[tuple[str, "Holder", Content, Content]]:
        """Yields each holder that holds other things than before: its name, itself, its contents before and now."""
        for name, (holder, before) in zip(self._names, self._holders, strict=True):
            if not _is_same(now := holder.content(), before):
                yield name, holder, before, now

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, (dict, list, deque, set)):
            self._hold(name, Items(value) if isinstance(value, dict) else Elements(value))
            self._visit_attributes(name, value)
        elif isinstance(value, (tuple, frozenset)):
            self._push((f"{name}[{place}]", part) for place, part in enumerate(value) if len(value) <= _LARGE)
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, CellType):
            self._hold(name, Cell(value))
        elif isinstance(value, type):
            if not is_theirs(value):
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
            self._visit_attributes(name, value)

    def _visit_attributes(self, name: str, value: Any) -> None:
        """The attributes of modules, and of objects that belong to the script or hold things of it."""
        kind = type(value)
        if isinstance(value, (nn.Module, *_HOLDERS)) or not is_theirs(kind):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._hold(name, Attributes(value))
            if slots := slots_of(kind):
                self._hold(name, Slots(value, slots))
            self._push([(kind.__qualname__, kind)])

    def _visit_class(self, kind: type) -> None:
        self._hold(kind.__qualname__, holder := ClassAttributes(kind), follow=False)
        for key, value in holder.content().items():
            found = holder.path(kind.__qualname__, key), value
            is_special = key.startswith("__") and key.endswith("__")
            if not isinstance(value, _FUNCTIONS):
                self._push([found])
            elif is_special:
                if key not in _ASIDE and not (key == "__init__" and issubclass(kind, nn.Module)):
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
        is_inside = function.__globals__.get("__name__", "").partition(".")[0] in _THEIRS  # a decorator's, maybe
        if is_inside and is_theirs(function):
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
            if isinstance(value, ModuleType) and not is_theirs(value):
                self._hold_names(vars(value), used)

    def _hold_names(self, names: dict[str, Any], used: list[str]) -> None:
        fresh = [each for each in used if (id(names), each) not in self._globals]
        self._globals.update((id(names), each) for each in fresh)
        if fresh:
            self._hold(names.get("__name__", ""), Names(names, fresh))

    def _hold(self, name: str, holder: "Holder", follow: bool = True) -> None:
        content = holder.content()
        self._holders.append((holder, content))
        self._names.append(name)
        if follow and (len(content) <= _LARGE or isinstance(holder, Attributes)):
            self._push((holder.path(name, key), value) for key, value in content.items())

    def _push(self, found: Iterable[tuple[str, Any]]) -> None:
        self._ahead.extend((name, value) for name, value in found if not isinstance(value, _PLAIN))

    def _copy(self, iterator: Any) -> None:
        try:
            self._copies[id(iterator)] = copy.copy(iterator)
        except Exception:  # some cannot be copied: they go on from where they are
            return
        self._states.append(functools.partial(lambda _: None, iterator))  # kept, so that its id stays its own


class Holder:
    """An object that holds others.

    Args:
        held: the object.
    """

    def __init__(self, held: Any):
        self.held = held

    def content(self) -> Content:
        """Returns its present things."""
        raise NotImplementedError

    def put(self, content: Content) -> None:
        """Has it hold that, and nothing else."""
        raise NotImplementedError

    def path(self, name: str, key: Any) -> str:
        """The name of a thing in it, for messages."""
        return f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]"


class Items(Holder):
    """A dictionary."""

    def __init__(self, held: dict):
        super().__init__(held)
        # Classes of their own may make values as they are asked for, or forbid changes.
        self._kind = OrderedDict if isinstance(held, OrderedDict) else dict

    def content(self) -> Content:
        return dict(self._kind.items(self.held))

    def put(self, content: Content) -> None:
        kind = self._kind
        kind.clear(self.held)
        for key, value in content.items():
            kind.__setitem__(self.held, key, value)


class Cache(Holder):
    """Results of a function of functools.lru_cache or functools.cache. New ones are taken out, with a bound all: they
    are computed again."""

    def content(self) -> Content:
        return dict(cache_of(self.held) or ())

    def put(self, content: Content) -> None:
        cache = cache_of(self.held)
        if cache is None or self.held.cache_info().maxsize is not None:
            self.held.cache_clear()
        else:
            for key in cache.keys() - content.keys():
                del cache[key]


class Elements(Holder):
    """A list, a deque or a set."""

    def __init__(self, held: list | deque | set):
        super().__init__(held)
        self._kind = next(each for each in (list, deque, set) if isinstance(held, each))

    def content(self) -> Content:
        held = list(self._kind.__iter__(self.held))
        return dict(zip(held, held, strict=True)) if self._kind is set else dict(enumerate(held))

    def put(self, content: Content) -> None:
        kind = self._kind
        kind.clear(self.held)
        if kind is set:
            kind.update(self.held, content)
        else:
            kind.extend(self.held, content.values())


class Attributes(Holder):
    """An object with a dictionary of attributes."""

    def content(self) -> Content:
        return dict(vars(self.held))

    def put(self, content: Content) -> None:
        names = vars(self.held)
        for name in names.keys() - content.keys():
            del names[name]
        for name, value in content.items():
            if names.get(name, MISSING) is not value:
                names[name] = value
        if list(names) != list(content):
            names.clear()
            names.update(content)

    def path(self, name: str, key: Any) -> str:
        return f"{name}.{key}" if name else str(key)


class Slots(Attributes):
    """An object that has slots instead."""

    def __init__(self, held: Any, slots: dict[str, Any]):
        super().__init__(held)
        self._slots = slots

    def content(self) -> Content:
        found = {}
        for name, slot in self._slots.items():
            try:
                found[name] = slot.__get__(self.held)
            except AttributeError:  # not set
                continue
        return found

    def put(self, content: Content) -> None:
        for name in self.content():
            if name not in content:
                self._slots[name].__delete__(self.held)
        for name, value in content.items():
            self._slots[name].__set__(self.held, value)


class ClassAttributes(Attributes):
    """A class."""

    def content(self) -> Content:
        return {name: value for name, value in vars(self.held).items() if name not in _HIDDEN}

    def put(self, content: Content) -> None:
        now = self.content()
        for name in now.keys() - content.keys():
            type.__delattr__(self.held, name)
        for name, value in content.items():
            if now.get(name, MISSING) is not value:
                type.__setattr__(self.held, name, value)


class Names(Attributes):
    """Global names of a file, some of them."""

    def __init__(self, held: dict[str, Any], names: Iterable[str]):
        super().__init__(held)
        self._names = list(names)

    def content(self) -> Content:
        return {name: self.held[name] for name in self._names if name in self.held}

    def put(self, content: Content) -> None:
        for name in self._names:
            if name in content:
                self.held[name] = content[name]
            else:
                self.held.pop(name, None)

    def path(self, name: str, key: Any) -> str:
        return str(key)


class Cell(Holder):
    """A name in a closure."""

    def content(self) -> Content:
        try:
            return {"": self.held.cell_contents}
        except ValueError:  # not set yet
            return {}

    def put(self, content: Content) -> None:
        if content:
            self.held.cell_contents = content[""]
        else:
            del self.held.cell_contents

    def path(self, name: str, key: Any) -> str:
        return name


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def is_theirs(made: Any) -> bool:
    """True for classes, functions and files of Python, torch and ourselves, of which nothing is put back."""
    name = made.__name__ if isinstance(made, ModuleType) else getattr(made, "__module__", None)
    return not isinstance(name, str) or name.partition(".")[0] in _THEIRS


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the slots of a class, by name."""
    found = {}
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names = {slots} if isinstance(slots, str) else set(slots) - set(_HIDDEN)
        found |= {name: vars(each)[name] for name in names if hasattr(vars(each).get(name), "__delete__")}
    return found


def cache_of(cached: Any) -> dict | None:
    """Returns where a function of functools.lru_cache or functools.cache keeps results; None where that is hidden."""
    parts = gc.get_referents(cached)
    places = [place for place, part in enumerate(parts) if part is getattr(cached, "__wrapped__", MISSING)]
    for place in reversed(places):
        if place and type(cache := parts[place - 1]) is dict and len(cache) == cached.cache_info().currsize:
            return cache
    return None


def _position(running: GeneratorType) -> Any:
    frame = running.gi_frame
    return None if frame is None else (frame.f_lasti, [id(each) for each in frame.f_locals.values()])


def _is_same(now: Content, before: Content) -> bool:
    return len(now) == len(before) and all(
        value is old and (key is other or (isinstance(key, (int, str)) and key == other))
        for (key, value), (other, old) in zip(now.items(), before.items(), strict=True)
    )


def generator(name: str, value: Any) -> Source | None:
    """Returns how the state of a generator of random numbers is read and set; None for anything else, and for one that
    has none."""
    kind = type(value).__name__
    if isinstance(value, torch.Generator):
        return Source(name, kind, lambda: value.get_state().numpy().tobytes(), functools.partial(_set_torchs, value))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(name, kind, value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    if isinstance(value, numpy.random.RandomState):
        return Source(name, kind, value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Source(name, kind, lambda: bits.state, functools.partial(setattr, bits, "state"))
    return None


def _source(name: str, value: Any) -> Source | None:
    """Returns how the state of an array or of a generator is read and set; None for anything else."""
    kind, numpy = type(value).__name__, sys.modules.get("numpy")
    if isinstance(value, bytearray):
        return Source(name, kind, lambda: bytes(value), functools.partial(value.__setitem__, slice(None)))
    is_array = numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))
    if is_array and value.flags.writeable and value.nbytes <= _LARGE_BYTES:
        return Source(name, kind, value.copy, functools.partial(value.__setitem__, ...))
    return generator(name, value)


def _set_torchs(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
