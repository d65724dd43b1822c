# SPDX-License-Identifier: Apache-2.0
"""Names that functions of a script share outside of modules: those of closures and globals, attributes of classes and
of bound objects. Which functions use which, and how, is read in their code and their source.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lamina.shared_state.contents import (
    THEIRS,
    Content,
    changed,
    content,
    is_changeable,
    is_generator,
    is_of_the_script,
    token,
)
from lamina.shared_state.uses import Use, uses
from lamina.util.reach import codes

_MAKING = {"__new__", "__init__", "__enter__", "__exit__", "__call__"}  # methods without a name in who calls them
_DEPTH = 3  # of functions that call functions


@dataclass
class Place:
    """A name, and who uses it.

    Attributes:
        name: as messages have it.
        read: gives its value.
        users: of each function, by where it runs (a partition, or a node of the model), what it is called in messages.
        words: for each function, the code that uses it, its own or that of one that it calls, and what it is called
            there.
        whose: the names of all modules that each function is of, or what else it is called in messages.
    """

    name: str
    read: Callable[[], Any]
    users: dict[CodeType, dict[int, str]] = field(default_factory=dict)
    words: dict[CodeType, set[tuple[CodeType, str]]] = field(default_factory=dict)
    whose: dict[CodeType, set[str]] = field(default_factory=dict)

    def look(self) -> Content:
        """Returns what it is and has, in this thread."""
        value = self.read()
        if isinstance(value, ContextVar):
            value = value.get(None)
        if isinstance(value, threading.local):
            return content(value)
        return {"is": token(value)} | (content(value) if is_changeable(value) else {})

    def elsewhere(self, here: int) -> dict[CodeType, str]:
        """The functions that run elsewhere, too."""
        others = {
            code: next((what for where, what in users.items() if where != here), None)
            for code, users in self.users.items()
        }
        return {code: what for code, what in others.items() if what is not None}

    def here(self, here: int) -> str:
        """A function that runs here."""
        return next((users[here] for users in self.users.values() if here in users), "a function")

    def tells_nothing(self, before: Content, after: Content, here: int) -> bool:
        """True where a change is nothing to functions that run elsewhere: they fill a cache, each for itself."""
        if changed(before, after) or isinstance(self.read(), threading.local):
            return not self.elsewhere(here)
        return not any(self._reads(code) and not self._writes(code) for code in self.elsewhere(here))

    def is_read(self) -> bool:
        """True where functions read what others of them change; else they all change it, and read no more of it than an
        update needs: a log, mostly, or a counter."""
        if is_generator(self.read()):
            return True
        if len(self.users) > 1:
            return any(map(self._reads, self.users))
        (code,) = self.users
        found = self._uses(code)
        read = [use for use in found if use.reads and (not use.writes or not use.certain)]
        written = [use for use in found if use.writes and use.certain]
        return any(_meet(one, other) for one in read for other in written)

    def is_read_outside(self, name: str) -> bool:
        """True where something else than the module of that name and those under it may read it."""
        readers = {what for code, whose in self.whose.items() if self._reads(code) for what in whose}
        if name == "the model":
            return "the step function" in readers
        return any(what != name and not what.startswith(f"{name}.") for what in readers)

    def keeps(self, here: int) -> bool:
        """True where a function here sets it, or a part of it, anew, and reads that further down."""
        for code, users in self.users.items():
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

    def _uses(self, code: CodeType) -> list[Use]:
        return [use for source, word in self.words[code] for use in uses(source) or () if use.name == word]

    def _reads(self, code: CodeType) -> bool:
        """True where it may."""
        found = self._uses(code)
        return not found or any(use.reads and (not use.writes or not use.certain) for use in found)

    def _writes(self, code: CodeType) -> bool:
        """True where it may."""
        found = self._uses(code)
        return not found or any(use.writes for use in found)


class Places:
    """The names that functions use, by whatever tells one from another."""

    def __init__(self) -> None:
        self.by_key: dict[Any, Place] = {}

    def add(self, function: Callable, where: int, what: str) -> None:
        """Notes what a function uses that runs at `where`."""
        self._note(_names(function, _DEPTH, set()), where, what)

    def add_module(self, module: nn.Module, where: int, what: str) -> None:
        """Notes what the functions of the script use that run when a module is called."""
        for function in _methods_of(module):
            self.add(function, where, what)
            for kind in type(module).__mro__ if isinstance(function, FunctionType) else ():
                used = {each for code in codes(function.__code__) for each in code.co_names}
                self._note(_of_class(kind, used, function.__code__), where, what)

    def _note(self, found: Iterable, where: int, what: str) -> None:
        for key, name, read, code, source in found:
            place = self.by_key.setdefault(key, Place(name, read))
            place.users.setdefault(code, {}).setdefault(where, what)
            place.whose.setdefault(code, set()).add(what)
            place.words.setdefault(code, set()).add((source, name.rpartition(".")[2]))


def _meet(one: Use, other: Use) -> bool:
    return one.part == other.part or None in (one.part, other.part) or ... in (one.part, other.part)


def _methods_of(module: nn.Module) -> Iterator[Callable]:
    """The functions of the script that run when a module is called."""
    for kind in type(module).__mro__:
        if is_of_the_script(kind):
            methods = {name: _function(each) for name, each in vars(kind).items()}
            yield from (each for name, each in methods.items() if each is not None and name != "__init__")
    functions = FunctionType, MethodType, functools.partial
    yield from (each for each in vars(module).values() if isinstance(each, functions))


def _names(function: Any, depth: int, seen: set) -> Iterator[tuple[Any, str, Callable[[], Any], CodeType, CodeType]]:
    """The names that a function, and those that it calls, use: a key, the name, its value, the function's code, and the
    code that uses it."""
    owner = None
    while isinstance(function, (functools.partial, MethodType)):
        if isinstance(function, MethodType):
            owner = function.__self__
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, FunctionType):
        owner, function = function, vars(type(function)).get("__call__")
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else None
    if not isinstance(function, FunctionType) or not is_of_the_script(function) or (function, id(owner)) in seen:
        return
    seen.add((function, id(owner)))
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        key = "cell", id(cell)  # which `read` keeps
        yield from _value(key, name, functools.partial(_of_cell, cell), code, depth, seen)
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in (dict(zip(positional, defaults, strict=True)) | (function.__kwdefaults__ or {})).items():
        read = functools.partial(lambda value: value, value)
        yield from _value((id(code), name), f"the default of {function.__qualname__}.{name}", read, code, depth, seen)
    used = {name for each in codes(code) for name in each.co_names}
    for name in used & function.__globals__.keys():
        read = functools.partial(function.__globals__.get, name)
        yield from _value((id(function.__globals__), name), name, read, code, depth, seen)
        if isinstance(found := read(), type):
            yield from _of_class(found, used, code)
            yield from _of_making(found, used, code, depth, seen)
        elif isinstance(found, FunctionType) and is_of_the_script(found):
            for each in used & vars(found).keys():
                read = functools.partial(vars(found).get, each)
                yield from _value((id(found), each), f"{name}.{each}", read, code, 0, seen)
        elif isinstance(found, ModuleType) and _is_of_the_script(found):
            for each in used & vars(found).keys():
                read = functools.partial(vars(found).get, each)
                yield from _value((id(vars(found)), each), f"{name}.{each}", read, code, depth, seen)
    if owner is not None and is_of_the_script(type(owner)) and not isinstance(owner, (nn.Module, type)):
        for name in used:
            if name in getattr(owner, "__dict__", ()):
                read = functools.partial(vars(owner).get, name)
                yield from _value((id(owner), name), f"{type(owner).__name__}.{name}", read, code, depth, seen)
            elif isinstance(method := getattr(type(owner), name, None), FunctionType) and depth:
                yield from _of_callee(MethodType(method, owner), code, depth, seen)


def _value(key: Any, name: str, read: Callable[[], Any], code: CodeType, depth: int, seen: set) -> Iterator:
    value = read()
    if isinstance(value, (FunctionType, MethodType)):
        if depth:
            yield from _of_callee(value, code, depth, seen)
    elif value is None or isinstance(value, (bool, int, float, str, torch.Tensor, ContextVar)) or is_changeable(value):
        # One dictionary under two names is one place.
        is_object = is_changeable(value) or isinstance(value, ContextVar)
        yield (("object", id(value)) if is_object else key), name, read, code, code


def _of_callee(function: Any, code: CodeType, depth: int, seen: set) -> Iterator:
    """The names that a function uses which the one with `code` calls."""
    yield from ((*found[:3], code, found[4]) for found in _names(function, depth - 1, seen))


def _is_of_the_script(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] not in THEIRS


def _of_class(kind: type, used: set[str], code: CodeType) -> Iterator:
    """The attributes of a class itself that are used."""
    if is_of_the_script(kind):
        for name in used & vars(kind).keys():
            read = functools.partial(getattr, kind, name, None)
            yield from _value((id(kind), name), f"{kind.__name__}.{name}", read, code, 0, set())


def _of_making(kind: type, used: set[str], code: CodeType, depth: int, seen: set) -> Iterator:
    """The names that methods of a class use, of its own attributes too, where a function makes objects of it or calls
    these methods of it."""
    if depth and is_of_the_script(kind) and not issubclass(kind, nn.Module):
        for name, held in vars(kind).items():
            if (name in used or name in _MAKING) and (method := _function(held)) is not None:
                yield from _of_callee(method, code, depth, seen)
                names = {each for every in codes(method.__code__) for each in every.co_names}
                yield from ((*found[:4], method.__code__) for found in _of_class(kind, names, code))


def _function(held: Any) -> FunctionType | None:
    """The function in what a class has, if that is a method."""
    held = held.__func__ if isinstance(held, (classmethod, staticmethod)) else held
    return held if isinstance(held, FunctionType) else None


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
