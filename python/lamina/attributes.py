# SPDX-License-Identifier: Apache-2.0
"""What modules keep in their attributes while a step runs, such as a mask or a residual.

Microbatches take turns within one module: while one waits for another rank, the next may set what the first has yet to
read. So each microbatch sees what it set itself, and what was set last where it set nothing. Numbers are what was set
last in any case: modules count with them. What changes within an object (a list that grows) is everybody's.
"""

import numbers
from collections.abc import Iterable
from typing import Any

from torch import nn

from lamina import _lamina, compiled

_MISSING = object()

_modules: set[int] = set()  # ids of those that microbatches share; their owner keeps them alive
_own: dict[int, dict[tuple[int, str], Any]] = {}  # what each microbatch set in this step, by id(module) and name
_replaced: dict[tuple[type, str], Any] = {}  # what classes had themselves where they have an _Attribute
_original = nn.Module.__setattr__


def install(modules: Iterable[nn.Module]) -> None:
    """From now on attributes that these modules set in a step are each microbatch's own. The caller keeps them alive
    until `remove`."""
    global _original
    _modules.clear()
    _modules.update(map(id, modules))
    if nn.Module.__setattr__ is not _set:
        _original = nn.Module.__setattr__
        nn.Module.__setattr__ = _set


def end_microbatch(microbatch: int) -> None:
    """Its step body is over. What it set on ranks that follow is kept until the step ends."""
    _own.pop(microbatch, None)


def end_step() -> None:
    """What was set last stays."""
    _own.clear()


def remove() -> None:
    """Attributes are torch's again."""
    _modules.clear()
    _own.clear()
    while _replaced:
        (kind, name), had = _replaced.popitem()
        if isinstance(vars(kind).get(name), _Attribute):
            delattr(kind, name) if had is _MISSING else setattr(kind, name, had)
    if nn.Module.__setattr__ is _set:
        nn.Module.__setattr__ = _original


@compiled.outside
def _set(self: nn.Module, name: str, value: Any) -> None:
    if id(self) in _modules and _lamina.microbatch() >= 0 and _is_plain(self, name, value):
        kind, key = type(self), (type(self), name)
        default = getattr(kind, name, _MISSING)
        if key not in _replaced and not hasattr(default, "__set__"):
            _replaced[key] = vars(kind).get(name, _MISSING)
            setattr(kind, name, _Attribute(name, default))
    _original(self, name, value)


def _is_plain(module: nn.Module, name: str, value: Any) -> bool:
    """Whether it is no parameter, buffer or submodule, nor one of torch's own."""
    state = vars(module)
    kept = any(name in state.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    return not kept and name != "training" and not isinstance(value, (nn.Parameter, nn.Module, nn.Buffer))


def _mine() -> dict[tuple[int, str], Any]:
    return _own.get(_lamina.microbatch(), {}) if _own else {}


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
        own = _mine().get((id(module), self._name), _MISSING)
        if own is not _MISSING:
            return own
        last = vars(module).get(self._name, _MISSING)
        return self._of_class(module, kind) if last is _MISSING else last

    @compiled.outside
    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value
        microbatch = _lamina.microbatch()
        if microbatch >= 0 and id(module) in _modules and not isinstance(value, numbers.Number):
            _own.setdefault(microbatch, {})[id(module), self._name] = value
        else:
            _mine().pop((id(module), self._name), None)

    def __delete__(self, module: nn.Module) -> None:
        _mine().pop((id(module), self._name), None)
        if vars(module).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)

    def _of_class(self, module: nn.Module | None, kind: type) -> Any:
        if self._default is _MISSING:
            raise AttributeError(self._name)
        bind = getattr(type(self._default), "__get__", None)
        return self._default if bind is None else bind(self._default, module, kind)
