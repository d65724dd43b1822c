# SPDX-License-Identifier: Apache-2.0
"""Arguments that have to be the same on all ranks that make a call together."""

import os
from collections.abc import Mapping
from typing import Any

from lamina import _lamina
from lamina.errors import UsageError
from lamina.exits.failures import sendable

_SHOWN = (bool, int, float, str, type(None))  # the classes of values that are compared; of others the class is


def require_same(session: _lamina.Session, group: str, call: str, code: str, **given: Any) -> None:
    """Raises the same UsageError on all ranks of a group where they have given different arguments to `call`, with the
    values. Collective, before the call does anything; `given` has the same names on all of them."""
    if differences := session.differing_arguments(group, call, as_texts(given)):
        raise UsageError(f"{call}: {differences}", code=code)


def as_texts(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names with values as they are compared."""
    return [(name, _text(value)) for name, value in given.items()]


def _text(value: Any) -> str:
    """A value as text by which it is compared: of a function its name, for each rank has an object of its own."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) in _SHOWN:
        return sendable(repr(value))
    name = getattr(value, "__qualname__", None)
    return sendable(str(name)) if isinstance(name, str) else f"of the type {type(value).__qualname__}"
