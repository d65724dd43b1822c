# SPDX-License-Identifier: Apache-2.0
"""Context variables (`contextvars`) that functions of a script use: each microbatch has its own values, and a call of
another rank's module takes along those that its caller has set.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lamina.errors import UsageError
from lamina.job import codec
from lamina.script_state.content import Content
from lamina.script_state.places import Place

_MISSING = object()


class ContextVariables:
    """The context variables that functions of the script use.

    Attributes:
        are_used: whether there are any.
    """

    def __init__(self) -> None:
        self.are_used = False
        self._places: dict[str, Place] = {}  # by what they are called on every rank
        self._before: dict[str, tuple[Any, Content]] = {}  # when the step began, in the thread that entered it
        self._changed: set[str] = set()  # those whose value has changed while it stayed one object

    def begin_step(self, places: Iterable[Place]) -> None:
        """A step begins, in this thread.

        Args:
            places: what functions of the script use.
        """
        found = [(_label(place), place) for place in places if travels(place)]
        self._places = dict(sorted(found, key=lambda each: each[0]))
        self.are_used = bool(found)
        self._before = {label: (_value(place), place.look()) for label, place in self._places.items()}

    def captured(self) -> bytes:
        """Returns what was set of them in the step in this context, as it travels; nothing where nothing was.

        Errors:
            UsageError: a value that cannot travel so.
        """
        told = {}
        for label, place in self._places.items():
            value, (before, content_before) = _value(place), self._before[label]
            if value is before and place.look() != content_before:
                self._changed.add(label)
            if value is not _MISSING and (value is not before or label in self._changed):
                told[label] = value
        if not told:
            return b""
        data, tensors = codec.pack(told)
        if tensors:
            raise UsageError(
                f"one of the context variables {', '.join(told)} has a tensor, and a module of another rank is called: "
                "hand tensors on as arguments",
                code="step-context-variable",
            )
        return data

    @contextmanager
    def set_here(self, told: bytes, name: str) -> Iterator[None]:
        """Inside, they have the values that `captured` gave on another rank.

        Args:
            told: as it travelled.
            name: of the module that runs inside.

        Errors:
            UsageError: it changes one that somebody else would have seen change, too.
        """
        given = codec.unpack(told, []) if told else {}
        tokens = [(variable := self._places[label].read(), variable.set(value)) for label, value in given.items()]
        before = {label: place.look() for label, place in self._places.items()}
        yield
        for label, place in self._places.items():
            if place.look() != before[label] and place.is_read_outside(name):
                raise UsageError(
                    f"the context variable {place.name} was changed by a module that was called from another rank, "
                    "which does not see that: return the value, or place both on one partition with set_partition",
                    code="step-context-variable",
                )
        for variable, set_before in reversed(tokens):
            variable.reset(set_before)


def travels(place: Place) -> bool:
    """True for a place that has a context variable."""
    return isinstance(place.read(), ContextVar)


def _value(place: Place) -> Any:
    return place.read().get(_MISSING)


def _label(place: Place) -> str:
    """Names a variable, on every rank alike."""
    used = sorted((code.co_name, code.co_firstlineno, word) for words in place.words.values() for code, word in words)
    return f"{place.read().name} ({':'.join(map(str, used[0]))})"
