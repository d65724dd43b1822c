# SPDX-License-Identifier: Apache-2.0
"""Names that functions of a script use outside of modules: those of closures and globals, attributes of classes and of
bound objects. The code of a function tells which of them it uses, and what other functions it may call.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from lamina.script_state.aliases import things_in
from lamina.script_state.content import is_changeable, is_plain_tensor, modules_within, whole_of
from lamina.script_state.kinds import (
    ASIDE,
    LARGE,
    PLAIN,
    InPlaceOfValue,
    attributes_of,
    codes,
    is_of_a_library,
    is_of_the_script,
)
from lamina.script_state.uses import uses

_UNNAMED = {"forward", "backward", "setup_context"}  # methods that run without a name in who calls them
_MAKING = {"__init__", "__new__", "__init_subclass__", "__set_name__"}  # methods that run when an object is made
_BY_WORDS = {"globals", "vars", "getattr", "setattr", "delattr", "__dict__", "__setattr__", "__delattr__"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module's calls
OF_TORCH = frozenset(vars(nn.Module()))  # attributes that it keeps in each module
_MOST = 2000  # functions that one may call

Callee = tuple[FunctionType, Any]  # a function, and the object that it is a method of


class Found(NamedTuple):
    """A name that a function uses.

    Attributes:
        key: tells what is used from other things.
        name: as messages have it.
        read: gives the value of the name.
        source: the code that uses it.
        word: what it is called there; None where the source does not tell what is done with it.
        way: which way leads to it: by an "attribute", from the "owner" of a method, or by the name with that key.
        alone: whether it matters though no other way does.
    """

    key: Any
    name: str
    read: Callable[[], Any]
    source: CodeType
    word: str | None
    way: Any
    alone: bool = False

    def things(self) -> dict[Any, Any]:
        """Returns what the name leads to now, by key."""
        return dict(reversed(list(things_in(self.read()))))


class Names:
    """The names that functions use, and those that they call. Each function is read once.

    Args:
        inside: modules that are watched otherwise.
    """

    def __init__(self, inside: Collection[nn.Module] = ()):
        self._inside = set(map(id, inside))
        self._kinds = sorted({kind for kind in map(type, inside) if is_of_the_script(kind)}, key=_name_of)
        self._read_before: dict[tuple[int, int], tuple[list[Found], list[Callee]]] = {}
        self._walked: dict[tuple, tuple[list[Found], list[FunctionType]]] = {}
        self._of_classes: dict[tuple[type, CodeType], list[Found]] = {}
        self._kept: list[Any] = []  # so that ids stay theirs

    def of(self, function: Any) -> list[Found]:
        """Returns the names of a function, or of an object that is called, and of all that it may call."""
        return self._reached(function)[0]

    def functions(self, function: Any) -> list[FunctionType]:
        """Returns the functions of the script among that one and all that it may call."""
        return [each for each in self._reached(function)[1] if is_of_the_script(each)]

    def _reached(self, function: Any) -> tuple[list[Found], list[FunctionType]]:
        begin = list(functions_of(function))
        key = tuple((id(each), id(owner)) for each, owner in begin)
        if key not in self._walked:
            self._kept.append(begin)
            self._walked[key] = self._walk(begin)
        return self._walked[key]

    def of_class(self, kind: type, code: CodeType) -> list[Found]:
        """Returns the names that a method with that code uses of its class, or of others by `type()`."""
        if (kind, code) not in self._of_classes:
            used = used_in(code) | {"forward"}
            kinds = {kind, *(self._kinds if used & {"type", "__class__"} else ())}
            named = [each for one in sorted(kinds, key=_name_of) for each in _parts(one, "", used)]
            self._of_classes[kind, code] = [each for one in named for each in self._found(*one, code)]
        return self._of_classes[kind, code]

    def _walk(self, ahead: list[Callee]) -> tuple[list[Found], list[FunctionType]]:
        found, seen, functions = {}, set(), []
        while ahead and len(seen) < _MOST:
            callee = ahead.pop()
            key = id(callee[0]), id(callee[1])
            if key in seen:
                continue
            seen.add(key)
            functions.append(callee[0])
            if key not in self._read_before:
                self._kept.append(callee)
                self._read_before[key] = self._read(*callee)
            names, callees = self._read_before[key]
            found |= {(each.key, each.source, each.word, each.way): each for each in names}
            ahead = ahead + callees
        return list(found.values()), functions

    def _read(self, function: FunctionType, owner: Any) -> tuple[list[Found], list[Callee]]:
        """The names that a function itself uses, and the functions that it may call."""
        if not is_of_the_script(function) or is_of_a_library(function.__globals__.get("__name__") or ""):
            return [], []  # around one of the script's, maybe, which is read for itself
        code = function.__code__
        used = used_in(code)
        found, callees = [], []
        for key, name, read in _named(function, used):
            found += self._found(key, name, read, code)
            value = read()
            callees += functions_of(value, used)
            for module in self._outside(value):
                callees += _methods(module, used)
        if _is_object(owner):
            for name in used & attributes_of(owner).keys():
                read = functools.partial(getattr, owner, name, None)
                called = self._found((id(owner), name), f"{type(owner).__name__}.{name}", read, code)
                found += (each._replace(way="owner") for each in called)
                callees += functions_of(read(), used)
            read, word = functools.partial(itself, owner), next(iter(code.co_varnames), "")
            found += self.held(read, type(owner).__name__, code, word, "owner")
            callees += functions_of(owner, used)
        callees_of_class = _parts(owner if isinstance(owner, type) else type(owner), "", used)
        for key, name, read in callees_of_class:
            found += self._found(key, name, read, code)
            callees += functions_of(read(), used)
        return found, callees

    def _found(self, key: Any, name: str, read: Callable[[], Any], code: CodeType) -> Iterator[Found]:
        value, word = read(), name.rpartition(".")[2]
        if isinstance(value, ModuleType):
            return
        if isinstance(value, ContextVar) or is_changeable(value):
            thing = ("object", id(whole_of(value)))
            yield Found(thing, name, read, code, word, thing if whole_of(value) is value else key, True)
        else:
            yield Found(
                key,
                name,
                read,
                code,
                word,
                key,
                isinstance(value, (*PLAIN, tuple, torch.Tensor)) or _is_set(code, word),
            )
        for thing, each in things_in(value):
            if each is not value or is_plain_tensor(value):
                yield Found(thing, name, read, code, None, key)
        yield from self._modules_in(value, name, code, key)

    def held(self, read: Callable[[], Any], name: str, code: CodeType, word: str, way: str) -> Iterator[Found]:
        """Gives what an attribute leads to, or what the object of a method is, as far as others may name it."""
        value = read()
        for thing, each in things_in(value):
            is_all = each is value and not is_plain_tensor(each)
            yield Found(thing, name, read, code, word if is_all else None, way)
        yield from self._modules_in(value, name, code, way)

    def _modules_in(self, value: Any, name: str, code: CodeType, way: Any) -> Iterator[Found]:
        """The state of modules, in containers too, that nobody watches otherwise."""
        for module in (each for one in (value, *modules_within(value)) for each in self._outside(one)):
            read = functools.partial(itself, vars(module))
            yield Found(("object", id(module)), name, read, code, None, way, True)

    def _outside(self, value: Any) -> list[nn.Module]:
        """`value` and all under it, where that is a module that is not watched otherwise."""
        if not isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] == "lamina":
            return []
        return [module for module in value.modules() if id(module) not in self._inside]


def code_of(function: Any) -> CodeType | None:
    """The code of a function of the script, inside of whatever is around it."""
    while not isinstance(function, FunctionType):
        if isinstance(function, (functools.partial, MethodType, functools.cached_property)):
            function = function.__func__ if isinstance(function, MethodType) else function.func
        elif isinstance(function, (staticmethod, classmethod, functools._lru_cache_wrapper)):
            function = function.__wrapped__
        elif not isinstance(function := inspect.getattr_static(function, "__call__", None), FunctionType):
            return None
    return inspect.unwrap(function).__code__


@functools.cache
def used_in(code: CodeType) -> frozenset[str]:
    """The names that a function, and functions in it, have in their code."""
    names = {name for each in codes(code) for name in each.co_names}
    return frozenset(names | words_in(code) if names & _BY_WORDS else names)


def words_in(code: CodeType) -> set[str]:
    """Texts in a function, and the keywords of its calls."""
    held = [each for every in codes(code) for each in every.co_consts]
    parts = [part for each in held for part in (each if isinstance(each, tuple) else (each,))]
    return {part for part in parts if isinstance(part, str)}


def methods_of(*kinds: type) -> Iterator[FunctionType]:
    """The functions of these classes, and of those that they derive from, as far as these are the script's."""
    for kind in {kind for each in kinds for kind in each.__mro__ if is_of_the_script(kind)}:
        yield from (each for each in vars(kind).values() if isinstance(each, FunctionType))


def functions_of(value: Any, used: Collection[str] = (), depth: int = 3) -> Iterator[Callee]:
    """The functions that a use of `value` may run, where the names `used` are used of it."""
    if isinstance(value, FunctionType):
        yield value, None
        inner = [vars(value).get("__wrapped__"), vars(value).get("registry")]  # of functools.singledispatch
    elif isinstance(value, MethodType):
        yield from ((function, value.__self__) for function, _ in functions_of(value.__func__, used, depth))
        return
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        inner = [value.__wrapped__]
    elif isinstance(value, property):
        inner = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.cached_property):
        inner = [value.func]
    elif isinstance(value, (list, tuple, dict, MappingProxyType)):
        inner = list(value) if isinstance(value, (list, tuple)) else list(value.values())
        inner = inner if len(inner) <= LARGE else []
    else:
        if not isinstance(value, nn.Module):
            yield from _methods(value, used)
        return
    for each in inner if depth else ():
        yield from functions_of(each, used, depth - 1)


def _methods(value: Any, used: Collection[str]) -> Iterator[Callee]:
    """The methods of an object, or of a class that makes objects: those with names that are used, and special ones."""
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    if is_class and issubclass(kind, nn.Module):
        return
    for each in (*kind.__mro__, *(type(kind).__mro__ if is_class else ())):
        for name, member in vars(each).items() if is_of_the_script(each) else ():
            is_special = name.startswith("__") and name.endswith("__") and name not in ASIDE
            if name in used or name in _UNNAMED or (is_special and (is_class or name not in _MAKING)):
                yield from ((function, value) for function, _ in functions_of(member, (), 1))


def _named(function: FunctionType, used: frozenset[str]) -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Names that a function uses: a key, the name, and how its value is read."""
    code, names = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(_of_cell, cell)  # which keeps it
        yield ("cell", id(cell)), name, read
        yield from _parts(read(), name, used)
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in (dict(zip(positional, defaults, strict=True)) | (function.__kwdefaults__ or {})).items():
        yield (id(code), name), f"the default of {function.__qualname__}.{name}", functools.partial(itself, value)
    for name in used & names.keys():
        read = functools.partial(names.get, name)
        yield (id(names), name), name, read
        yield from _parts(read(), name, used)
    for name in used & sys.modules.keys() - names.keys():  # imported in the function
        yield from _parts(sys.modules[name], name, used)


def _parts(holder: Any, name: str, used: frozenset[str], depth: int = 3) -> Iterator:
    """Gives the parts of a class, a function or a file that are used."""
    if isinstance(holder, type):
        kinds = [kind for kind in (*holder.__mro__, type(holder)) if is_of_the_script(kind)]
        names = {each: vars(kind)[each] for kind in kinds for each in used & vars(kind).keys()}
        for each, value in names.items():
            if not type(value).__module__.startswith("lamina"):  # ours, which watches attributes
                for kind in kinds:
                    yield (id(kind), each), f"{kind.__name__}.{each}", functools.partial(_of_class, kind, each)
    elif isinstance(holder, FunctionType) and is_of_the_script(holder):
        for each in used & vars(holder).keys():
            yield (id(holder), each), f"{name}.{each}", functools.partial(vars(holder).get, each)
    elif isinstance(holder, ModuleType) and is_of_the_script(holder) and depth:
        for each in used & vars(holder).keys():
            read = functools.partial(vars(holder).get, each)
            yield (id(vars(holder)), each), f"{name}.{each}", read
            if isinstance(read(), (type, ModuleType)):
                yield from _parts(read(), f"{name}.{each}", used, depth - 1)


def _is_set(code: CodeType, word: str) -> bool:
    return any(use.name == word and use.writes and use.certain and use.part is None for use in uses(code) or ())


def _is_object(owner: Any) -> bool:
    """True for an object of a class of the script's own that is no module."""
    return owner is not None and is_of_the_script(type(owner)) and not isinstance(owner, (nn.Module, type))


def itself(value: Any) -> Any:
    """Gives `value`, which a partial of this keeps."""
    return value


def _of_class(kind: type, name: str) -> Any:
    value = inspect.getattr_static(kind, name, None)
    value = value.of_class if isinstance(value, InPlaceOfValue) else value
    return value.__get__(None, kind) if isinstance(value, (staticmethod, classmethod)) else value


def _name_of(kind: type) -> str:
    return kind.__qualname__


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
