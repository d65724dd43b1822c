# SPDX-License-Identifier: Apache-2.0
"""`module.training`, of which each microbatch has its own value in a step.

Microbatches take turns: while one waits for another rank in the middle of a forward, the next may call `model.eval()`.
So what a microbatch sets is its own until the step ends; where it has set nothing it sees what was there when the step
began, or what the body before it has left. Classes get a descriptor as soon as one of their modules is set to another
mode in a step, and no sooner: most scripts do that between steps.
"""

import sys
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError, said
from lamina.script_state.kinds import InPlaceOfValue
from lamina.shared_state.modules import Modules

_NAME = "training"
_CALL = nn.Module._call_impl.__code__

Modes = dict[int, bool]  # by the place of a module among the model's


class TrainingModes:
    """The modes that microbatches have set.

    Attributes:
        modules: those that have a mode for each microbatch, in a step, which may be under way; none until they are
            known.
    """

    def __init__(self) -> None:
        self.modules = Modules()
        self._own: dict[int, Modes] = {}  # what each microbatch has set in this step
        self._begun: dict[int, Modes] = {}  # what each has found that bodies before it left
        self._ended: set[int] = set()
        self._read: dict[int, set[int]] = {}  # by place: microbatches that read what was there when the step began
        self._unseen: set[int] = set()  # places of which nobody knows who read them before, in this step
        self._kinds: set[type] = set()  # that have a `_Mode`

    def remove(self) -> None:
        """Modes are torch's again."""
        self.end_step()
        while self._kinds:
            kind = self._kinds.pop()
            if isinstance(vars(kind).get(_NAME), _Mode):
                delattr(kind, _NAME)

    def before_set(self, module: nn.Module, value: Any) -> None:
        """Before a module's mode is set."""
        if module not in self.modules or _lamina.microbatch() < 0:
            return
        kind = type(module)
        is_plain = not hasattr(kind, _NAME) and not isinstance(module, torch.jit.ScriptModule)
        if is_plain and vars(module).get(_NAME) != value:
            self._kinds.add(kind)
            kind.training = _Mode(self)
            if not _in_forward():  # which sets a mode and then uses it
                self._unseen.add(self.modules.places[id(module)])

    def begin_microbatch(self, microbatch: int) -> None:
        """A step body begins, with what those before it have left."""
        left: Modes = {}
        for before in sorted(self._ended):
            left |= self._own.get(before, {}) if before < microbatch else {}
        self._begun[microbatch] = left

    def end_microbatch(self, microbatch: int) -> None:
        """A step body is over.

        Errors:
            UsageError: it leaves a module in another mode than it found, and another one went on without that.
        """
        self._ended.add(microbatch)
        for place in self._changed_by(microbatch):
            others = {each for each in self._begun if each > microbatch and place not in self._own.get(each, {})}
            if others and (place in self._unseen or not others.isdisjoint(self._read.get(place, ()))):
                raise self._left_error(place)

    def left(self) -> Modes:
        """Returns the modes that the bodies of this step have set, as they leave them."""
        return {place: value for each in sorted(self._own) for place, value in self._own[each].items()}

    def end_step(self, modes: Modes | None = None) -> None:
        """The modes that were set last stay: by this rank, or `modes` of the rank that leads."""
        final = self.left() | (modes or {})
        for kept in (self._own, self._begun, self._ended, self._read, self._unseen):
            kept.clear()
        for place, value in final.items():
            vars(self.modules.all[place])[_NAME] = value

    def read(self, module: nn.Module) -> bool:
        """The mode of a module for the microbatch of this thread."""
        place, microbatch = self.modules.places.get(id(module)), _lamina.microbatch()
        if microbatch >= 0 and place is not None:
            for modes in (self._own, self._begun):
                if place in (known := modes.get(microbatch, {})):
                    return known[place]
            self._read.setdefault(place, set()).add(microbatch)
            if any(each < microbatch and place in self._changed_by(each) for each in self._ended):
                raise self._left_error(place)
        return vars(module)[_NAME]

    def write(self, module: nn.Module, value: Any) -> None:
        """Sets the mode of a module, in a step for the microbatch of this thread."""
        microbatch, place = _lamina.microbatch(), self.modules.places.get(id(module))
        if microbatch >= 0 and place is not None:
            self._own.setdefault(microbatch, {})[place] = value
        else:
            vars(module)[_NAME] = value

    def _changed_by(self, microbatch: int) -> list[int]:
        """Places whose modes a body leaves otherwise than it found them."""
        found = self._begun.get(microbatch, {})
        now = self._own.get(microbatch, {}).items()
        return [place for place, value in now if value != found.get(place, vars(self.modules.all[place])[_NAME])]

    def _left_error(self, place: int) -> UsageError:
        changed = f"{self.modules.names[place] or 'the model'} in another mode (training or evaluation)"
        how = said("left-changed", changed, "modes before the step or at the beginning of the body", "them")
        return UsageError(how, code="step-mode")


class _Mode(InPlaceOfValue):
    """The attribute of the modules of one class."""

    def __init__(self, modes: TrainingModes):
        self._modes = modes

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            raise AttributeError(_NAME)
        return self._modes.read(module)

    def __set__(self, module: nn.Module, value: Any) -> None:
        self._modes.write(module, value)


def _in_forward() -> bool:
    """True in a call of a module."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None
