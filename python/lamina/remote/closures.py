# SPDX-License-Identifier: Apache-2.0
"""Objects that functions of a script share outside of modules: names of a closure, global names, attributes of a bound
object.

A dictionary that a hook fills and a step body reads, say. Each rank has its own, filled by what runs there. Which
functions use which names can be read in their code; that one of these has changed is seen in a step. Where functions
that run on different ranks use it, or, with several microbatches under way, several functions of one rank, that is an
error: the others would go on with what is out of date, or another microbatch's. So are hooks that a step body hangs on
modules, where they are not called, or for other microbatches, too.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina import _lamina
from lamina.errors import UsageError
from lamina.integrations import hugging_face
from lamina.job import current
from lamina.util.contents import (
    Content,
    changed,
    changed_by_more_than_counting,
    content,
    is_changeable,
    is_of_the_script,
    token,
)

_BODY = "the step function"
_DEPTH = 3  # of functions that call functions
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass
class _Place:
    """A name, and who uses it."""

    name: str
    read: Callable[[], Any]
    users: dict[CodeType, dict[int, str]] = field(default_factory=dict)  # by partition, what it is called in messages
    before: Content = field(default_factory=dict)
    microbatch: int = -1  # that changed it last
    told: bool = False

    def look(self) -> Content:
        value = self.read()
        return {"is": token(value)} | (content(value) if is_changeable(value) else {})

    def user_elsewhere(self, here: int) -> str | None:
        """A function of another partition than `here`."""
        others = (what for users in self.users.values() for partition, what in users.items() if partition != here)
        return next(others, None)

    def users_here(self, here: int) -> str:
        return next((users[here] for users in self.users.values() if here in users), "a function")

    def used_twice(self, here: int) -> bool:
        """True where several functions use it on partition `here`."""
        return sum(here in users for users in self.users.values()) > 1


_places: dict[Any, _Place] = {}
_watched: list[_Place] = []
_bodies: dict[tuple, Callable] = {}  # of step functions, as they are called; kept, so that ids stay theirs
_modules: list[tuple[str, nn.Module, int]] = []
_handles = 0  # as many hooks of whatever kind there were when those of the modules were looked at
_looked = 0  # the same for the last look within a step
_hung: dict[int, set[int]] = {}  # their ids, by id(module)
_here = 0
_in_turns = False


def install(modules: Iterable[tuple[str, nn.Module, int]], here: int, in_turns: bool) -> None:
    """From now on what functions share is watched in steps.

    Args:
        modules: the model's with their names, and the partition of each.
        here: this rank's.
        in_turns: whether several microbatches may be under way.
    """
    global _here, _in_turns
    _places.clear()
    _here, _in_turns = here, in_turns
    _modules[:] = modules
    for name, module, partition in _modules:
        for function in _methods_of(module):
            _add(function, partition, name or "the model")
            for kind in type(module).__mro__ if isinstance(function, FunctionType) else ():
                used = {each for code in _codes(function.__code__) for each in code.co_names}
                _note(_of_class(kind, used, function.__code__), partition, name or "the model")
    _add_hooks()
    for body in _bodies.values():
        _add(body, 0, _BODY)
    _watch()


def remove() -> None:
    """Ends `install`."""
    for kept in (_places, _watched, _bodies, _modules, _hung):
        kept.clear()


def begin_step(body: Callable, owner: tuple) -> None:
    """A step begins, whose body the rank of partition 0 runs; `owner`: the object of which it is a method, if any."""
    key = id(body), id(owner[0]) if owner else None
    if key not in _bodies:
        if not _bodies:
            current.job().on_end.callback(remove)
        _bodies[key] = MethodType(body, owner[0]) if owner else body
        if _modules:
            _add(_bodies[key], 0, _BODY)
    if _handles != RemovableHandle.next_id:
        _add_hooks()
    _watch()


def look() -> None:
    """Called where other ranks, or another microbatch, may go on with what is here.

    Errors:
        UsageError: what functions share has changed, and not all of them see that.
    """
    if RemovableHandle.next_id not in (_handles, _looked):
        _look_at_hooks()
    for place in _watched:
        after = place.look()
        if after == place.before:
            continue
        before, place.before = place.before, after
        microbatch, place.microbatch = place.microbatch, _lamina.microbatch()
        other = place.user_elsewhere(_here) if changed(before, after) else None
        if other is not None and len(place.users) == 1:
            _tell(place, other)
        elif other is not None:
            raise UsageError(
                f"{place.name}, which {place.users_here(_here)} changes on partition {_here}, is used by {other} as "
                "well, which does not see that: they run on different ranks. Hand the value on as an argument or a "
                "result, or place both on one partition with set_partition",
                code="step-name-shared",
            )
        turns = _in_turns and place.used_twice(_here) and microbatch not in (-1, _lamina.microbatch())
        if turns and changed_by_more_than_counting(before, after):
            raise UsageError(
                f"{place.name} is changed by several microbatches, which run in turns, and read by another function "
                "than the one that changes it: set active_microbatches to 1, or return the value",
                code="step-object-shared",
            )


def _tell(place: _Place, other: str) -> None:
    """Warns, once, of what a function changes that runs on other ranks as well: a log, mostly, or a counter."""
    if not place.told:
        place.told = True
        warnings.warn(
            f"{place.name} is changed by {place.users_here(_here)} on partition {_here}, and by {other}, which runs on "
            "another rank: each rank has its own",
            stacklevel=2,
        )


def _watch() -> None:
    _watched[:] = [
        place for place in _places.values() if place.user_elsewhere(_here) or (_in_turns and place.used_twice(_here))
    ]
    for place in _watched:
        place.before, place.microbatch = place.look(), -1


def _add(function: Callable, partition: int, what: str) -> None:
    _note(_names(function, _DEPTH, set()), partition, what)


def _note(found: Iterable, partition: int, what: str) -> None:
    for key, name, read, code in found:
        place = _places.setdefault(key, _Place(name, read))
        place.users.setdefault(code, {}).setdefault(partition, what)


def _add_hooks() -> None:
    global _handles
    _handles = RemovableHandle.next_id
    for name, module, partition in _modules:
        hooks = _hooks_of(module)
        _hung[id(module)] = set(hooks)
        for hook in hooks.values():
            _add(hook, partition, f"a hook of {name or 'the model'}")


def _look_at_hooks() -> None:
    global _looked
    _looked = RemovableHandle.next_id
    for name, module, partition in _modules:
        hung = _hooks_of(module).keys() - _hung[id(module)]
        if hung and _in_turns and partition == _here:  # elsewhere `foreign` refuses it
            raise UsageError(
                f"a hook was hung in a step on {name or 'the model'}, where it is called for other microbatches, too: "
                "hang it before the step, or set active_microbatches to 1",
                code="step-hook",
            )


def _hooks_of(module: nn.Module) -> dict[int, Callable]:
    """By number. Hugging Face's own collect what a model returns, and are no hooks of the script's."""
    found = {number: hook for kind in _HOOKS for number, hook in vars(module).get(kind, {}).items()}
    theirs = hugging_face.collectors(module) if found else []
    return {number: hook for number, hook in found.items() if hook not in theirs}


def _methods_of(module: nn.Module) -> Iterator[Callable]:
    """The functions of the script that run when a module is called."""
    for kind in type(module).__mro__:
        if is_of_the_script(kind):
            methods = {name: each for name, each in vars(kind).items() if isinstance(each, FunctionType)}
            yield from (each for name, each in methods.items() if name != "__init__")
    if "forward" in vars(module):
        yield vars(module)["forward"]


def _names(function: Any, depth: int, seen: set) -> Iterator[tuple[Any, str, Callable[[], Any], CodeType]]:
    """The names that a function, and those that it calls, use: a key, the name, its value, and whose code it is."""
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
    for number, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
        read = functools.partial(lambda value: value, value)
        yield from _value((id(code), number), f"a default argument of {function.__qualname__}", read, code, depth, seen)
    used = {name for each in _codes(code) for name in each.co_names}
    for name in used & function.__globals__.keys():
        read = functools.partial(function.__globals__.get, name)
        yield from _value((id(function.__globals__), name), name, read, code, depth, seen)
        if isinstance(kind := read(), type):
            yield from _of_class(kind, used, code)
    if owner is not None and is_of_the_script(type(owner)) and not isinstance(owner, (nn.Module, type)):
        for name in used:
            if name in vars(owner):
                read = functools.partial(vars(owner).get, name)
                yield from _value((id(owner), name), f"{type(owner).__name__}.{name}", read, code, depth, seen)
            elif isinstance(method := getattr(type(owner), name, None), FunctionType) and depth:
                yield from ((*found[:3], code) for found in _names(MethodType(method, owner), depth - 1, seen))


def _value(key: Any, name: str, read: Callable[[], Any], code: CodeType, depth: int, seen: set) -> Iterator:
    value = read()
    if isinstance(value, (FunctionType, MethodType)):
        if depth:
            yield from ((*found[:3], code) for found in _names(value, depth - 1, seen))
    elif value is None or isinstance(value, (bool, int, float, str, torch.Tensor)) or is_changeable(value):
        # One dictionary under two names is one place.
        yield (("object", id(value)) if is_changeable(value) else key), name, read, code


def _of_class(kind: type, used: set[str], code: CodeType) -> Iterator:
    """The attributes of a class itself that are used."""
    if is_of_the_script(kind):
        for name in used & vars(kind).keys():
            read = functools.partial(getattr, kind, name, None)
            yield from _value((id(kind), name), f"{kind.__name__}.{name}", read, code, 0, set())


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
