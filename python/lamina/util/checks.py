# SPDX-License-Identifier: Apache-2.0
"""Arguments that are not what they have to be, said in the words of the argument."""

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from lamina.errors import UsageError


def require_module(module: Any, what: str) -> None:
    """Errors: UsageError: `what` was given no module."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"{what} takes an nn.Module, not {type(module).__name__}")


def require_booleans(**given: Any) -> None:
    """Errors: UsageError: an argument is neither True nor False; "False" would count as True."""
    _require(given, lambda value: type(value) is bool, "True or False")


def require_count(**given: Any) -> None:
    """Errors: UsageError: an argument is no integer from 1."""
    _require(given, lambda value: type(value) is int and value >= 1, "an integer, at least 1")


def require_positive(**given: Any) -> None:
    """Errors: UsageError: an argument is no number above 0."""
    _require(given, lambda value: type(value) in (int, float) and 0 < value < float("inf"), "a number above 0")


def require_no_nul(**given: Any) -> None:
    """Errors: UsageError: a path or a name has a NUL, at which the system would cut it off."""
    for name, value in given.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, str) and "\0" in text:
            raise UsageError(f"{name} has a NUL, which no name of a file has: {text!r}")


def _require(given: dict[str, Any], holds: Callable[[Any], bool], what: str) -> None:
    for name, value in given.items():
        if not holds(value):
            raise UsageError(f"{name} is {what}, not {value!r}")
