# SPDX-License-Identifier: Apache-2.0
"""Objects that hold others: what they hold now, and how they are made to hold what they did."""

import gc
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lamina.script_state.kinds import HIDDEN, MISSING, slots_of

Content = dict[Any, Any]  # what a holder has, by name, key, or place


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
        self.kind = OrderedDict if isinstance(held, OrderedDict) else dict

    def content(self) -> Content:
        return dict(self.kind.items(self.held))

    def put(self, content: Content) -> None:
        kind = self.kind
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
        self.kind = next(each for each in (list, deque, set) if isinstance(held, each))

    def content(self) -> Content:
        held = list(self.kind.__iter__(self.held))
        return dict(zip(held, held, strict=True)) if self.kind is set else dict(enumerate(held))

    def put(self, content: Content) -> None:
        kind = self.kind
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
        return {name: value for name, value in vars(self.held).items() if name not in HIDDEN}

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


class Block:
    """Holders that are compared at once, as fast as C goes through their parts.

    Args:
        held: each with what it held.

    Attributes:
        slow: places of those that have to be compared one by one.
    """

    def __init__(self, held: Sequence[tuple[Holder, Content]]):
        objects = [each for each in held if type(each[0]) is Attributes]
        dicts = [each for each in held if type(each[0]) is Items and each[0].kind is dict]
        lists = [each for each in held if type(each[0]) is Elements and each[0].kind is list]
        self._objects, self._dicts, self._lists = ([holder.held for holder, _ in of] for of in (objects, dicts, lists))
        fast = {id(holder) for of in (objects, dicts, lists) for holder, _ in of}
        self.slow = [at for at, (holder, _) in enumerate(held) if id(holder) not in fast]
        dicts, lists = ([content for _, content in of] for of in ([*objects, *dicts], lists))
        self._sizes = list(map(len, dicts + lists))
        self._parts = list(_parts(dicts, map(dict.values, lists)))

    def is_same(self) -> bool:
        """True where all but the slow ones hold the same objects, in the same order. May be False for equal names."""
        dicts = [*map(vars, self._objects), *self._dicts]
        sizes = [*map(dict.__len__, dicts), *map(list.__len__, self._lists)]
        parts = _parts(dicts, map(list.__iter__, self._lists))
        return sizes == self._sizes and all(map(operator.is_, parts, self._parts))


def _parts(dicts: list[Content], lists: Iterable[Iterable[Any]]) -> Iterator[Any]:
    parts = itertools.chain(map(dict.keys, dicts), map(dict.values, dicts), lists)
    return itertools.chain.from_iterable(parts)


def cache_of(cached: Any) -> dict | None:
    """Returns where a function of functools.lru_cache or functools.cache keeps results; None where that is hidden."""
    parts = gc.get_referents(cached)
    places = [place for place, part in enumerate(parts) if part is getattr(cached, "__wrapped__", MISSING)]
    for place in reversed(places):
        if place and type(cache := parts[place - 1]) is dict and len(cache) == cached.cache_info().currsize:
            return cache
    return None


def is_same(now: Content, before: Content) -> bool:
    """True where a holder holds the same objects, in the same order."""
    return len(now) == len(before) and all(
        value is old and (key is other or (isinstance(key, (int, str)) and key == other))
        for (key, value), (other, old) in zip(now.items(), before.items(), strict=True)
    )


def holders_of(value: Any) -> list[Holder]:
    """Returns what reads and fills an object or a container: its items or elements, its attributes, its slots."""
    kind, found = type(value), []
    if issubclass(kind, dict):
        found.append(Items(value))
    elif issubclass(kind, (list, deque, set)):
        found.append(Elements(value))
    if isinstance(getattr(value, "__dict__", None), dict):
        found.append(Attributes(value))
    return [*found, Slots(value, slots)] if (slots := slots_of(kind)) else found
