# SPDX-License-Identifier: Apache-2.0
"""Places where functions of a script leave something for each other, and who uses what of them."""

import functools
import threading
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, MethodType
from typing import Any, NamedTuple

from torch import nn

from lamina.script_state.content import Content, changed, content, is_changeable, is_generator, token
from lamina.script_state.kinds import is_of_the_script
from lamina.script_state.names import OF_TORCH, Found, Names, code_of, functions_of, itself, used_in
from lamina.script_state.uses import Use, uses
from lamina.util.module_names import is_in_module

_UNKNOWN = Use("", None, True, True, False, (0, 0), (0, 0))  # of what the source does not tell


class Change(NamedTuple):
    """The parts of something that have changed.

    Attributes:
        before, after: the contents.
        parts: attributes, keys or places in it; `...` for all of it.
        stored: all parts that it has.
    """

    before: Content
    after: Content
    parts: frozenset[Any]
    stored: frozenset[Any]

    @classmethod
    def of(cls, before: Content, after: Content, is_cache: bool = False) -> "Change":
        """Compares two contents. A cache may hold more or less, as long as all that stays is what it was."""
        keys = before.keys() & after.keys() if is_cache else {*before, *after}
        before, after = ({key: each[key] for key in keys if key in each} for each in (before, after))
        parts = frozenset(_part(key) for key in keys if before.get(key, cls) != after.get(key, cls))
        return cls(before, after, parts, frozenset(map(_part, keys)))

    def meets(self, use: Use) -> bool:
        """True where a use may be one of what has changed. A part that is not stored may stand for any other one."""
        part = use.part
        return ... in self.parts or part in (None, ...) or part in self.parts or part not in self.stored


@dataclass
class Place:
    """Something that functions use, and who does.

    Attributes:
        name: as messages have it.
        read: gives its value.
        users: of each function, by where it runs (a partition, or a node of the model), what it is called in messages.
        words: for each function, the code that uses it, its own or that of one that it calls, and what it is called
            there.
        whose: the names of all modules that each function is of, or what else it is called in messages.
        known: ids of objects that are places themselves, with at least the same users: a look goes no deeper there.
    """

    name: str
    read: Callable[[], Any]
    users: dict[CodeType, dict[int, str]] = field(default_factory=dict)
    words: dict[CodeType, set[tuple[CodeType, str | None]]] = field(default_factory=dict)
    whose: dict[CodeType, set[str]] = field(default_factory=dict)
    known: Collection[int] = ()

    def change(self, before: Content, after: Content) -> Change:
        """Compares two looks."""
        return Change.of(before, after, isinstance(self.read(), functools._lru_cache_wrapper))

    def add(self, use: "_Pending") -> None:
        """Notes who uses it."""
        self.users.setdefault(use.code, {}).setdefault(use.where, use.what)
        self.whose.setdefault(use.code, set()).add(use.what)
        self.words.setdefault(use.code, set()).add((use.found.source, use.found.word))

    def look(self) -> Content:
        """Returns what it is and has, in this thread."""
        value = self.read()
        if isinstance(value, ContextVar):
            value = value.get(None)
        if isinstance(value, threading.local):
            return content(value)
        return {"is": token(value)} | (content(value, self.known) if is_changeable(value) else {})

    def elsewhere(self, here: int, change: Change | None = None) -> dict[CodeType, str]:
        """The functions that run elsewhere, too, of those that meet a change."""
        others = {
            code: next((what for where, what in users.items() if where != here), None)
            for code, users in self._met(change).items()
        }
        return {code: what for code, what in others.items() if what is not None}

    def is_used(self, here: int) -> bool:
        """True where a function uses it that runs here."""
        return any(here in users for users in self.users.values())

    def here(self, here: int) -> str:
        """A function that runs here; one that writes, if any."""
        found = {self._writes(code): users[here] for code, users in self.users.items() if here in users}
        return found.get(True, found.get(False, "a function"))

    def nodes(self, change: Change | None = None) -> set[int]:
        """Returns where the functions run that meet a change."""
        return {where for users in self._met(change).values() for where in users}

    def tells_nothing(self, change: Change, here: int) -> bool:
        """True where a change is nothing to functions that run elsewhere: they fill a cache, each for itself."""
        others = self.elsewhere(here, change)
        if changed(change.before, change.after) or isinstance(self.read(), threading.local):
            return not others
        return not any(self._reads(code) and not self._writes(code) for code in others)

    def is_read(self, change: Change | None = None) -> bool:
        """True where functions read what others of them change; else they all change it, and read no more of it than an
        update needs: a log, mostly, or a counter."""
        if is_generator(self.read()):
            return True
        met = self._met(change)
        if len(met) != 1:
            return any(map(self._reads, met))
        (code,) = met
        found = self._uses(code)
        read = [use for use in found if use.reads and (not use.writes or not use.certain)]
        written = [use for use in found if use.writes and use.certain]
        return any(_meet(one, other) for one in read for other in written) if written else bool(read)

    def is_read_outside(self, name: str) -> bool:
        """True where something else than the module of that name and those under it may read it."""
        readers = {what for code, whose in self.whose.items() if self._reads(code) for what in whose}
        if name == "the model":
            return "the step function" in readers
        return not all(is_in_module(what, name) for what in readers)

    def keeps(self, here: int, change: Change | None = None) -> bool:
        """True where one call of a function here may read what another one has changed: several use it, or one sets it,
        or a part of it, anew, and reads that further down."""
        met = self._met(change)
        if sum(here in users for users in met.values()) > 1:
            return True
        for code, users in met.items():
            found = self._uses(code) if here in users else []
            anew = [use for use in found if use.writes and not use.reads]
            read = [use for use in found if use.reads and not use.writes]
            if any(_meet(one, other) and one.last < other.first for one in anew for other in read):
                return True
        return False

    def counts(self, part: Any) -> bool:
        """True where what functions do with this part of it only ever updates it."""
        anew = [use for code in self.users for use in self._uses(code) if use.writes and not use.reads]
        return not any(use.part in (part, None, ...) for use in anew)

    def _met(self, change: Change | None) -> dict[CodeType, dict[int, str]]:
        if change is None:
            return self.users
        return {code: users for code, users in self.users.items() if any(map(change.meets, self._uses(code)))}

    def _uses(self, code: CodeType) -> list[Use]:
        found = [[use for use in uses(source) or () if use.name == word] for source, word in self.words[code]]
        return [use for each in found for use in (each or [_UNKNOWN])]

    def _reads(self, code: CodeType) -> bool:
        """True where it may."""
        return any(use.reads and (not use.writes or not use.certain) for use in self._uses(code))

    def _writes(self, code: CodeType) -> bool:
        """True where it may."""
        return any(use.writes for use in self._uses(code))


class _Pending(NamedTuple):
    """A use of something by a function."""

    found: Found
    code: CodeType
    where: int
    what: str


class Places:
    """Things that functions use, by whatever tells one from another.

    Args:
        modules: those whose attributes are watched for themselves. What is in these is a place where it has another
            name, too.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()):
        self.by_key: dict[Any, Place] = {}
        self._names = Names(list(modules))
        self._pending: dict[Any, list[_Pending]] = {}
        self._known: set[int] = set()  # ids of what has a place because several ways lead to it, all of which are kept
        self._led_to: dict[Callable, dict[Any, Any]] = {}  # what names lead to, by what reads them, within one `add`

    def add(self, function: Callable, where: int, what: str, of_held: bool = False) -> None:
        """Notes what a function uses that runs at `where`.

        Args:
            of_held: whether it is a method of an object in an attribute, which is watched as that.
        """
        if (code := code_of(function)) is not None:
            for found in self._names.of(function):
                is_held = of_held and found.way == "owner"
                used = found._replace(way="attribute", alone=False) if is_held else found
                self._note(_Pending(used, code, where, what))
        self._led_to.clear()

    def add_module(self, module: nn.Module, where: int, what: str) -> None:
        """Notes what the functions of the script use that run when a module is called."""
        kinds = [kind for kind in type(module).__mro__ if is_of_the_script(kind)]
        members = [each for kind in kinds for name, each in vars(kind).items() if name != "__init__"]
        attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        methods = {id(method): method for each in members for method, _ in functions_of(each, (), 1)}
        used: set[str] = set()
        for method in methods.values():
            self.add(method, where, what)
            code = code_of(method)
            used |= used_in(code)
            found = list(self._names.of_class(type(module), code))
            for name in used_in(code) & attributes.keys():
                read = functools.partial(vars(module).get, name)
                found += self._names.held(read, f"{type(module).__name__}.{name}", code, name, "attribute")
            for each in found:
                self._note(_Pending(each, code, where, what))
        for value in attributes.values():
            used = used.union(*(used_in(function.__code__) for function, _ in functions_of(value)))
        for value in attributes.values():
            for function, owner in functions_of(value, used):
                method = function if owner is None else MethodType(function, owner)
                self.add(method, where, what, not isinstance(value, (MethodType, functools.partial)))
        self._led_to.clear()

    def _note(self, use: _Pending) -> None:
        key = use.found.key
        if key not in self.by_key:
            pending = self._pending.setdefault(key, [])
            pending.append(use)
            ways = {each.found.way for each in pending}
            if not use.found.alone and (len(ways) == 1 or ways == {"attribute"}):
                return
            self.by_key[key] = self._place(use.found, self._pending.pop(key))
        self.by_key[key].add(use)

    def _place(self, found: Found, uses_before: list[_Pending]) -> Place:
        if found.alone:
            place = Place(found.name, found.read)
        else:
            thing = self._thing(found)
            place = Place(found.name, functools.partial(itself, thing), known=self._known)
            self._known.add(id(thing))
        for use in uses_before:
            if self._is_there(use.found):
                place.add(use)
        return place

    def _is_there(self, found: Found) -> bool:
        """True where a name still leads to what is used."""
        return found.key[0] not in ("object", "memory") or found.alone or self._thing(found) is not None

    def _thing(self, found: Found) -> Any:
        """Returns what is used, as long as the name, or something in its value, is that; else None."""
        if found.read not in self._led_to:
            self._led_to[found.read] = found.things()
        return self._led_to[found.read].get(found.key)


def _part(key: Any) -> Any:
    """The part that a key of a content tells of."""
    if not isinstance(key, tuple) or key == ((), "size") or key == ((), "state"):
        return ...
    path, name = key
    return path[0] if path else name


def _meet(one: Use, other: Use) -> bool:
    return one.part == other.part or None in (one.part, other.part) or ... in (one.part, other.part)
