# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: each gives back what was given, or names it and says what is expected."""

import math
import numbers
import os
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from lamina.errors import ConfigError
from lamina.util.checks import of_address


def number(name: str, given: Any, least: float = -math.inf, whole: bool = False) -> Any:
    """A finite number of at least so much.

    Args:
        name: of the argument.
        given: its value.
        least: the smallest one that is allowed.
        whole: whether it has to be a whole number.
    """
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(given, bool) or not isinstance(given, kind) or not (-math.inf < given < math.inf and given >= least):
        limit = "" if least == -math.inf else f", {least:g} or more"
        raise wrong(name, given, f"a {'whole ' * whole}number{limit}")
    return given


def count_or_all(name: str, given: Any) -> int:
    """How many of them; -1: all."""
    if type(given) is not int or given < -1 or given == 0:
        raise wrong(name, given, "a whole number, 1 or more, or -1 for all")
    return given


def flag(name: str, given: Any) -> Any:
    """True or False, or 1 or 0."""
    if not isinstance(given, int) or given not in (0, 1):
        raise wrong(name, given, "True or False")
    return given


def text(name: str, given: Any) -> str:
    """A string that is not empty."""
    if not isinstance(given, str) or not given:
        raise wrong(name, given, "a string, and not empty")
    return given


def path(name: str, given: Any) -> str:
    """A path of a file system of this machine; that of an address `file://`, or of a home, `~`."""
    found = text(name, os.fspath(given) if hasattr(given, "__fspath__") else given)
    if "\0" in found:
        raise wrong(name, given, "a path, which has no zero bytes")
    if found.startswith("file://"):
        found = text(name, url2pathname(urlsplit(found).path))
    if problem := of_address(name, found):
        raise ConfigError(problem, code="checkpoint-remote")
    return os.path.expanduser(found)


def differs(given: Any, default: Any) -> bool:
    """Tells whether something else was given, which may be of a kind that cannot be compared."""
    try:
        return given is not default and bool(given != default)
    except Exception:  # several answers of an array, say
        return True


def listed(given: Any) -> list[Any]:
    """One, several or None as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def function(name: str, given: Any) -> Any:
    """Something that can be called, or None."""
    if given is not None and not callable(given):
        raise wrong(name, given, "a function")
    return given


def wrong(name: str, given: Any, expected: str) -> ConfigError:
    """The error of an argument that is not what is expected.

    Args:
        name: of the argument.
        given: its value.
        expected: what it should be, after "it is".
    """
    return ConfigError(f"{name}={given!r}: it is {expected}")
