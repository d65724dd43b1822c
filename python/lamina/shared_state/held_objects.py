# SPDX-License-Identifier: Apache-2.0
"""Objects in attributes, which microbatches use in turns: what one changes another one may have yet to read."""

import functools
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from lamina.errors import UsageError
from lamina.script_state.content import (
    Content,
    changed_by_more_than_counting,
    content,
    is_changeable,
    is_generator,
    put_numbers,
    token,
    within,
)
from lamina.script_state.names import methods_of
from lamina.script_state.uses import uses


class HeldObjects:
    """Keeps how each microbatch of a step has left them."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, Any]] = {}  # the microbatch that used one last, and the object, by its id
        self._left: dict[int, dict[int, Content]] = {}  # the content when another one came, by who was there before

    def used(self, value: Any) -> bool:
        """True where it was used in this step."""
        return id(value) in self._latest

    def use(self, value: Any, name: str, microbatch: int, codes: Callable[[], Iterable[CodeType]], path: str) -> None:
        """A microbatch is about to use one. Numbers that it has left there, and others have replaced, are there again,
        unless all that the script does with them is to count.

        Args:
            value: the object.
            name: of the attribute that holds it.
            microbatch: who uses it.
            codes: gives those of the functions that may do so.
            path: of the attribute, for messages.

        Errors:
            UsageError: another microbatch has changed more than numbers since this one was here.
        """
        latest, _ = self._latest.get(id(value), (microbatch, None))
        self._latest[id(value)] = microbatch, value
        if latest == microbatch:
            return
        now = content_of(value)
        left = self._left.setdefault(id(value), {})
        left[latest] = now
        before = left.pop(microbatch, None)
        if before is None or before == now or is_generator(value):  # whose numbers are anybody's
            return
        if changed_by_more_than_counting(before, now):
            raise UsageError(
                f"what is in {path} was changed by microbatch {latest} between two uses of it by microbatch "
                f"{microbatch}: set active_microbatches to 1, or give each call an object of its own, by setting the "
                "attribute anew",
                code="step-object-shared",
            )
        replaced = {key: was for key, was in before.items() if now.get(key, was) != was}
        put_numbers(value, {key: was for key, was in replaced.items() if not _counts(name, key[1], value, codes())})

    def end_microbatch(self, microbatch: int) -> None:
        """It uses nothing any more."""
        for left in self._left.values():
            left.pop(microbatch, None)

    def end_step(self) -> None:
        """Nor does any other."""
        self._latest.clear()
        self._left.clear()


def content_of(value: Any) -> Content:
    """As `content`, of tensors that may be written in place as well."""
    return content(value) if is_changeable(value) else {"is": token(value)}


def _counts(name: str, part: Any, value: Any, codes: Iterable[CodeType]) -> bool:
    """True where all that the script does with item or attribute `part` of `value`, which attribute `name` holds, only
    ever updates it."""
    methods = [each for each in methods_of(*map(type, within(value))) if each.__name__ != "__init__"]
    anew = {each for code in codes for each in _set_anew(code, False)}
    anew |= {each for method in methods for each in _set_anew(method.__code__, True)}
    return part not in anew and (name, ...) not in anew


@functools.cache
def _set_anew(code: CodeType, of_self: bool) -> set[Any]:
    """Items and attributes that a function sets to something new, of its own object or of others; (name, ...) for items
    that its source does not say."""
    anew = [use for use in uses(code) or () if use.writes and not use.reads and use.part is not None]
    return {(use.name, ...) if use.part is ... else use.part for use in anew if of_self or use.name != "self"}
