# SPDX-License-Identifier: Apache-2.0
"""Values that modules keep in their attributes while a step runs, such as a mask or a residual.

Microbatches take turns within one module: while one waits for another rank, the next may set what the first has yet to
read. So each microbatch sees what it set itself, and what was set last where it set nothing. What is in an object (a
dictionary that a hook fills) is everybody's: there it is an error when one microbatch changes it between two uses by
another.

[Note: updates] A statement may make an attribute's new value of its old one (`self.count += 1`). It goes on from the
value that was set last, by whichever microbatch, unless its own microbatch has set the attribute anew before. So
counters count, and state that begins with each microbatch is its own. Nobody else comes between the two halves of an
update: before it reads, this thread waits for all that it may wait for.

[Note: homes of attributes] Every rank has all modules as objects, so what one rank sets the others do not see. The
partition on which an attribute of a module is set in a step is the attribute's home. On all others it is an error to
read or to set it in a step, and reading it afterwards warns. None of them is to go on with a value that is out of date.
They hear of homes with the calls between them: `news_for` goes with a request and with its answer, and what a rank has
heard it tells on. What an attribute holds counts as the attribute, under all names that it has in the model. A trace
ties modules that share attributes to one rank beforehand (tracing/state.py), and all ranks know then what it saw set.
"""

import functools
import inspect
import numbers
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.shared_state.contents import (
    Content,
    changed,
    is_changeable,
    is_of_the_script,
    is_plain_tensor,
    same,
    within,
)
from lamina.shared_state.held_objects import HeldObjects, content_of
from lamina.shared_state.uses import updates_here
from lamina.torch_patches import compiled, training_modes
from lamina.util.settings import setting

Key = tuple[int, str]  # an attribute: id(module) and its name
News = tuple[int, str, int]  # a module by its place among the model's, an attribute, its home

_MISSING = object()
_BETWEEN = {__file__, compiled.__file__, nn.modules.module.__file__}  # who reads and sets for a script

_TORCHS = frozenset(vars(nn.Module()))

_modules: dict[int, int] = {}  # of those that microbatches share, by id, their place; their owner keeps them alive
_listed: list[nn.Module] = []
_names: list[str] = []
_elsewhere: Callable[[nn.Module], int | None] | None = None  # the partition of what others own
_here = 0
_homes: dict[Key, int] = {}  # by id(module) and name
_foreign: dict[Key, int] = {}  # of those, what is, or is also, set on another partition
_news: list[News] = []
_told: dict[int, int] = {}  # how many of them each other partition was told
_own: dict[int, dict[Key, Any]] = {}  # what each microbatch set in this step, by id(module) and name
_anew: dict[int, set[Key]] = {}  # of those, what it has set by more than updates
_updated: dict[int, dict[Key, Any]] = {}  # what updates of each microbatch have read and not set yet
_contents: dict[Key, Content] = {}  # of attributes that hold what can change, as it was when last looked at
_aliases: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}  # by `_alias`: who hold it
_used: dict[Key, nn.Module] = {}  # those of `_contents` that were read since, in a step
_objects = HeldObjects()
_told_of: set[Key] = set()  # what was read after a step on a rank that is not its home
_setters: dict[Key, "_Setter"] = {}  # which call of another rank set one last
_waited: set[str] = set()
_bodies: set[CodeType] = set()  # of step functions
_served = threading.local()  # `.name`: of the module that this thread runs for another rank
_steps = 0
_replaced: dict[tuple[type, str], Any] = {}  # what classes had themselves where they have an _Attribute
_original = nn.Module.__setattr__


def install(
    modules: Iterable[tuple[str, nn.Module]],
    here: int,
    elsewhere: Callable[[nn.Module], int | None],
    waited: Sequence[str] = (),
) -> None:
    """From now on attributes that these modules set in a step are each microbatch's own, and of one partition.

    Args:
        modules: the model's, with their names, alike on every rank. The caller keeps them alive until `remove`.
        here: this rank's partition.
        elsewhere: the partition of a module that another rank owns, None for any other.
        waited: names of modules whose callers wait for them, so that what is called next finds what they set.
    """
    global _original, _here, _elsewhere
    named = list(modules)
    _forget()
    _names[:] = [name for name, _ in named]
    _listed[:] = [module for _, module in named]
    _modules.update((id(module), place) for place, module in enumerate(_listed))
    _here, _elsewhere = here, elsewhere
    _waited.update(waited)
    for module, name, value in _held():
        _hold(module, name, value)
    if nn.Module.__setattr__ is not _set:
        _original = nn.Module.__setattr__
        nn.Module.__setattr__ = _set


def begin_step(body: Callable) -> None:
    """A step begins, of that function."""
    body = inspect.unwrap(body)
    if isinstance(body, FunctionType):
        _bodies.add(body.__code__)


def end_microbatch(microbatch: int) -> None:
    """Its step body is over. What it set on ranks that follow is kept until the step ends."""
    for kept in (_own, _anew, _updated):
        kept.pop(microbatch, None)
    _objects.end_microbatch(microbatch)


def end_step(failed: bool = False) -> None:
    """The value that was set last stays. After a step that has failed nobody knows what the others heard."""
    global _steps
    _steps += 1
    _objects.end_step()
    for kept in (_own, _anew, _updated):
        kept.clear()
    if failed:
        _told.clear()


def remove() -> None:
    """Attributes are torch's again."""
    global _elsewhere
    _forget()
    _elsewhere = None  # which keeps a model
    _bodies.clear()
    while _replaced:
        (kind, name), had = _replaced.popitem()
        if isinstance(vars(kind).get(name), _Attribute):
            delattr(kind, name) if had is _MISSING else setattr(kind, name, had)
    if nn.Module.__setattr__ is _set:
        nn.Module.__setattr__ = _original


def news_for(partition: int) -> list[News]:
    """Returns what that partition has not been told of homes; from now on it has. See [Note: homes of attributes].

    Errors:
        UsageError: see `touch`.
    """
    _look_at_contents()
    told = _told.get(partition, 0)
    if told == len(_news):
        return []
    _told[partition] = len(_news)
    return [news for news in _news[told:] if news[2] != partition]


def hear(news: Iterable[News], by_all: bool = False) -> None:
    """Takes what another rank's `news_for` gave, or what all ranks hear at once."""
    for place, name, home in news:
        module = _listed[place]
        key = id(module), name
        if home == _here and by_all:
            _homes[key] = home
        if home == _here or _foreign.get(key) == home:
            continue
        _guard(type(module), name)
        _foreign[key] = home
        _homes.setdefault(key, home)
        if not by_all:
            _news.append((place, name, home))


def touch(module: nn.Module, name: str) -> None:
    """Notes that what `module` has in attribute `name` has changed here, in a step.

    Errors:
        UsageError: its home is another partition.
    """
    key = id(module), name
    if key in _foreign:
        raise UsageError(_message(module, name, "set"), code="step-attribute-shared")
    if key not in _homes:
        _homes[key] = _here
        _news.append((_modules[id(module)], name, _here))


def serving(name: str) -> AbstractContextManager[None]:
    """Inside, this thread runs the module of that name for another rank."""
    return setting(name, _served_name, functools.partial(setattr, _served, "name"))


def _served_name() -> str | None:
    return getattr(_served, "name", None)


@dataclass
class _Setter:
    name: str  # of the module that was called
    turn: tuple[int, int]  # step and microbatch
    again: bool = False  # it was set in another turn before


def _note_setter(key: Key, microbatch: int) -> None:
    if (name := _served_name()) is not None:
        turn, before = (_steps, microbatch), _setters.get(key)
        _setters[key] = _Setter(name, turn, before is not None and (before.again or before.turn != turn))


def _require_order(module: nn.Module, name: str, microbatch: int) -> None:
    """Raises UsageError where what one call of another rank sets, in each microbatch anew, is read in a call of another
    module: their order is kept where the caller waits for the first."""
    setter, reader = _setters[id(module), name], _served_name()
    crosses = setter.turn == (_steps, microbatch) and reader not in (None, setter.name)
    if crosses and setter.again and setter.name not in _waited:
        raise UsageError(
            f"{_path(module, name)} is set in a call of {setter.name} and read in one of {reader}, by a rank that does "
            f"not wait in between: lamina.set_dynamic() of {setter.name}, before the first step, has it wait",
            code="step-attribute-order",
        )


def _forget() -> None:
    end_step()
    for kept in (_modules, _listed, _names, _homes, _foreign, _news, _told, _contents, _aliases, _used, _waited):
        kept.clear()
    _told_of.clear()
    _setters.clear()


def _held() -> list[tuple[nn.Module, str, Any]]:
    """Attributes that hold what can change, and tensors that several modules have."""
    theirs = [module for module in _listed if not type(module).__module__.startswith("torch.")]
    all_of = [
        (module, name, value)
        for module in theirs
        for name, value in vars(module).items()
        if name not in _TORCHS and (is_changeable(value) or is_plain_tensor(value))
    ]
    holders: dict[int, set[int]] = {}
    for module, _, value in all_of:
        holders.setdefault(_alias(value), set()).add(id(module))
    return [each for each in all_of if is_changeable(each[2]) or len(holders[_alias(each[2])]) > 1]


def _hold(module: nn.Module, name: str, value: Any) -> None:
    """From now on uses of what is in an attribute are noticed."""
    _guard(type(module), name)
    _contents[id(module), name] = content_of(value)
    for each in within(value) or [value]:
        _aliases.setdefault(_alias(each), (each, []))[1].append((module, name))


def _alias(value: Any) -> int:
    """Names what changes together: one object, or tensors in one memory."""
    in_memory = is_plain_tensor(value) and value.layout is torch.strided and value.numel()
    return value.untyped_storage().data_ptr() if in_memory else id(value)


def _look_at_contents() -> None:
    """Touches the attributes whose content has changed since it was looked at last."""
    while _used:
        key, module = _used.popitem()
        value = vars(module).get(key[1])
        before, after = _contents[key], content_of(value)
        _contents[key] = after
        if before == after:
            continue
        aliases = [alias for each in within(value) or [value] for alias in _aliases.get(_alias(each), (each, []))[1]]
        others = [(other, name) for other, name in aliases if (id(other), name) != key]
        # A dictionary that several modules only add to is a cache, which each rank fills for itself.
        if not others or changed(before, after):
            for alias in [(module, key[1]), *others]:
                touch(*alias)


def _use(module: nn.Module, name: str, value: Any, microbatch: int) -> None:
    """A microbatch reads an attribute that holds what can change."""
    key = id(module), name
    if not _objects.used(value) and key not in _used:  # a script may have changed it between steps, on every rank
        _contents[key] = content_of(value)
    _used[key] = module
    _objects.use(value, name, microbatch, _codes, _path(module, name))


def _codes() -> Iterator[CodeType]:
    """Gives the code of functions that run in a step."""
    kinds = {kind for module in _listed for kind in type(module).__mro__ if is_of_the_script(kind)}
    yield from (each.__code__ for kind in kinds for each in vars(kind).values() if isinstance(each, FunctionType))
    yield from _bodies


@compiled.outside
def _set(self: nn.Module, name: str, value: Any) -> None:
    if name == "training":
        training_modes.expect(self, value)
    elif id(self) in _modules and _lamina.microbatch() >= 0:
        if _is_plain(self, name, value):
            _guard(type(self), name)
        elif not isinstance(value, nn.Module) and (owner := _elsewhere(self)) is not None:
            raise UsageError(
                f"{_path(self, name)}, a parameter or buffer of partition {owner}, is set on partition {_here}: its "
                "owner does not see that; set it in the module's own forward, or place what sets it there, too",
                code="step-buffer-set",
            )
    _original(self, name, value)


def _guard(kind: type, name: str) -> None:
    """Has attributes of that name be `_Attribute`s of the class, unless the class has a property of that name."""
    default = getattr(kind, name, _MISSING)
    if (kind, name) not in _replaced and not hasattr(default, "__set__"):
        _replaced[kind, name] = vars(kind).get(name, _MISSING)
        setattr(kind, name, _Attribute(name, default))


def _is_plain(module: nn.Module, name: str, value: Any) -> bool:
    """True where it is no parameter, buffer or submodule, nor one of torch's own."""
    state = vars(module)
    kept = any(name in state.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    return not kept and not isinstance(value, (nn.Parameter, nn.Module, nn.Buffer))


def _user() -> FrameType:
    """The frame of the script that reads or sets an attribute."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _goes_on(module: nn.Module, name: str, microbatch: int) -> bool:
    """True where an update by a microbatch goes on from what was set last; see [Note: updates]."""
    return (id(module), name) not in _anew.get(microbatch, ())


def _note_update(module: nn.Module, name: str, last: Any, value: Any, microbatch: int) -> None:
    """Raises UsageError where another microbatch has set the attribute since the update that ends here read it."""
    key = id(module), name
    read = _updated.get(microbatch, {}).pop(key, _MISSING)
    if not updates_here(_user(), name):
        _anew.setdefault(microbatch, set()).add(key)
    elif isinstance(read, (numbers.Number, torch.Tensor)) and not same(read, last) and not same(last, value):
        raise UsageError(
            f"{_path(module, name)} was set by another microbatch between the reading and the setting of it by "
            f"microbatch {microbatch}, which waited for another rank in between: call modules of other ranks before "
            "the statement that updates it, or set active_microbatches to 1",
            code="step-update-torn",
        )


def _mine() -> dict[Key, Any]:
    return _own.get(_lamina.microbatch(), {}) if _own else {}


def _path(module: nn.Module, name: str) -> str:
    path = _names[_modules[id(module)]]
    return f"{path}.{name}" if path else f"attribute {name!r} of the model"


def _message(module: nn.Module, name: str, done: str) -> str:
    home = _foreign[id(module), name]
    return (
        f"{_path(module, name)} is set on partition {home} in a step, and {done} on partition {_here}: attributes stay "
        "on the rank that sets them. Hand the value on as an argument or a result, or place the modules that set and "
        f"read it on one partition: set_partition(module, {home})"
        + (", or 0 where a step's body does that" if home and not _here else "")
    )


def _refuse_to_read(module: nn.Module, name: str) -> None:
    """An error in a step; after it, where a script may look at what its rank did, a warning, once."""
    if _lamina.microbatch() >= 0:
        raise UsageError(_message(module, name, "read"), code="step-attribute-shared")
    if (id(module), name) not in _told_of:
        _told_of.add((id(module), name))
        warnings.warn(_message(module, name, "read"), stacklevel=4)


class _Attribute:
    """An attribute of the modules of one class.

    Args:
        name: of the attribute. What was set last is in the module's dictionary, where torch has it.
        default: what the class has, for a module that has none.
    """

    def __init__(self, name: str, default: Any):
        self._name = name
        self._default = default

    @compiled.outside
    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return self._of_class(None, kind)
        if _foreign and (id(module), self._name) in _foreign:
            _refuse_to_read(module, self._name)
        microbatch = _lamina.microbatch()
        updates = microbatch >= 0 and id(module) in _modules and updates_here(_user(), self._name)
        own = _mine().get((id(module), self._name), _MISSING)
        if own is not _MISSING and not (updates and _goes_on(module, self._name, microbatch)):
            if (id(module), self._name) in _setters:
                _require_order(module, self._name, microbatch)
            return own
        if updates:
            _lamina.settle()
            _updated.setdefault(microbatch, {})[id(module), self._name] = self._last(module)
        last = vars(module).get(self._name, _MISSING)
        if last is _MISSING:
            return self._of_class(module, kind)
        if (id(module), self._name) in _contents and microbatch >= 0:
            _use(module, self._name, last, microbatch)
        return last

    @compiled.outside
    def __set__(self, module: nn.Module, value: Any) -> None:
        microbatch = _lamina.microbatch()
        shared = microbatch >= 0 and id(module) in _modules
        if shared and ((id(module), self._name) in _foreign or not same(self._last(module), value)):
            touch(module, self._name)
        if shared:
            _note_update(module, self._name, self._last(module), value, microbatch)
        vars(module)[self._name] = value
        if shared and is_changeable(value):
            _contents.setdefault((id(module), self._name), {})
        if shared:
            _own.setdefault(microbatch, {})[id(module), self._name] = value
            _note_setter((id(module), self._name), microbatch)
        else:
            _mine().pop((id(module), self._name), None)

    def __delete__(self, module: nn.Module) -> None:
        if _lamina.microbatch() >= 0 and id(module) in _modules:
            touch(module, self._name)
        _mine().pop((id(module), self._name), None)
        if vars(module).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)

    def _last(self, module: nn.Module) -> Any:
        return vars(module).get(self._name, self._default)

    def _of_class(self, module: nn.Module | None, kind: type) -> Any:
        if self._default is _MISSING:
            raise AttributeError(self._name)
        bind = getattr(type(self._default), "__get__", None)
        return self._default if bind is None else bind(self._default, module, kind)
