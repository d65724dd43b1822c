# SPDX-License-Identifier: Apache-2.0
"""`module.training`, of which each microbatch has its own value in a step.

Microbatches take turns: while one waits for another rank in the middle of a forward, the next may call `model.eval()`.
So what a microbatch sets is its own until the step ends; where it has set nothing it sees what was there when the step
began, or what the body before it has left. Classes get a descriptor as soon as one of their modules is set to another
mode in a step, and no sooner: most scripts do that between steps.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError

_NAME = "training"
_CALL = nn.Module._call_impl.__code__

Modes = dict[int, bool]  # by the place of a module among the model's

_places: dict[int, int] = {}  # by id(module); their owner keeps them alive
_modules: list[nn.Module] = []
_names: list[str] = []
_own: dict[int, Modes] = {}  # what each microbatch has set in this step
_begun: dict[int, Modes] = {}  # what each has found that bodies before it left
_ended: set[int] = set()
_read: dict[int, set[int]] = {}  # by place: microbatches that read what was there when the step began
_unseen: set[int] = set()  # places of which nobody knows who read them before, in this step
_kinds: set[type] = set()


def install(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """From now on these modules have a mode for each microbatch, in a step, which may be under way.

    Args:
        modules: with their names, alike on every rank.
    """
    named = list(modules)
    _places.clear()
    _names[:] = [name for name, _ in named]
    _modules[:] = [module for _, module in named]
    _places.update((id(module), place) for place, module in enumerate(_modules))


def remove() -> None:
    """Modes are torch's again."""
    end_step()
    for kept in (_places, _modules, _names):
        kept.clear()
    while _kinds:
        kind = _kinds.pop()
        if isinstance(vars(kind).get(_NAME), _Mode):
            delattr(kind, _NAME)


def expect(module: nn.Module, value: Any) -> None:
    """Before a module's mode is set."""
    if id(module) not in _places or _lamina.microbatch() < 0:
        return
    kind = type(module)
    is_plain = not hasattr(kind, _NAME) and not isinstance(module, torch.jit.ScriptModule)
    if is_plain and vars(module).get(_NAME) != value:
        _kinds.add(kind)
        kind.training = _Mode()
        if not _in_forward():  # which sets a mode and then uses it
            _unseen.add(_places[id(module)])


def begin_microbatch(microbatch: int) -> None:
    """A step body begins, with what those before it have left."""
    left: Modes = {}
    for before in sorted(_ended):
        left |= _own.get(before, {}) if before < microbatch else {}
    _begun[microbatch] = left


def end_microbatch(microbatch: int) -> None:
    """A step body is over.

    Errors:
        UsageError: it leaves a module in another mode than it found, and another one went on without that.
    """
    _ended.add(microbatch)
    for place in _changed_by(microbatch):
        others = {each for each in _begun if each > microbatch and place not in _own.get(each, {})}
        if others and (place in _unseen or not others.isdisjoint(_read.get(place, ()))):
            raise _left_error(place)


def left() -> Modes:
    """Returns the modes that the bodies of this step have set, as they leave them."""
    return {place: value for each in sorted(_own) for place, value in _own[each].items()}


def end_step(modes: Modes | None = None) -> None:
    """The modes that were set last stay: by this rank, or `modes` of the rank that leads."""
    final = left() | (modes or {})
    for kept in (_own, _begun, _ended, _read, _unseen):
        kept.clear()
    for place, value in final.items():
        vars(_modules[place])[_NAME] = value


def _changed_by(microbatch: int) -> list[int]:
    """Places whose modes a body leaves otherwise than it found them."""
    found = _begun.get(microbatch, {})
    now = _own.get(microbatch, {}).items()
    return [place for place, value in now if value != found.get(place, vars(_modules[place])[_NAME])]


def _left_error(place: int) -> UsageError:
    return UsageError(
        f"the step body left {_names[place] or 'the model'} in another mode (training or evaluation) than it found, "
        "when the next microbatch had begun, which in one process begins with what this one left: set modes before the "
        "step or at the beginning of the body, or put them back at its end; or set schedule: interleaved and "
        "active_microbatches: 1",
        code="step-mode",
    )


def _in_forward() -> bool:
    """True in a call of a module."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None


class _Mode:
    """The attribute of the modules of one class."""

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            raise AttributeError(_NAME)
        place, microbatch = _places.get(id(module)), _lamina.microbatch()
        if microbatch >= 0 and place is not None:
            for modes in (_own, _begun):
                if place in (known := modes.get(microbatch, {})):
                    return known[place]
            _read.setdefault(place, set()).add(microbatch)
            if any(each < microbatch and place in _changed_by(each) for each in _ended):
                raise _left_error(place)
        return vars(module)[_NAME]

    def __set__(self, module: nn.Module, value: Any) -> None:
        microbatch, place = _lamina.microbatch(), _places.get(id(module))
        if microbatch >= 0 and place is not None:
            _own.setdefault(microbatch, {})[place] = value
        else:
            vars(module)[_NAME] = value
