# SPDX-License-Identifier: Apache-2.0
"""Arguments that are not what they have to be, said in the words of the argument."""

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from lamina.errors import UsageError, refusal

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")  # pathlib makes s3:/ of s3://


def require_module(module: Any, what: str) -> None:
    """Errors: UsageError: `what` was given no module."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"{what} takes an nn.Module, not {type(module).__name__}")


def require_booleans(**given: Any) -> None:
    """Errors: UsageError: an argument is neither True nor False; "False" would count as True."""
    for name, value in given.items():
        if type(value) is not bool:
            raise UsageError(f"{name} is True or False, not {value!r}")


def require_count(**given: Any) -> None:
    """Errors: UsageError: an argument is no integer from 1."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise refusal("not-a-count", name, repr(value))


def require_positive(**given: Any) -> None:
    """Errors: UsageError: an argument is no number above 0."""
    for name, value in given.items():
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise refusal("not-positive", name, repr(value))


def require_local(**given: Any) -> None:
    """Errors: UsageError: a path or a name is an address of a store, begins with a shell's word for a home, or has a
    NUL, at which the system would cut it off."""
    for name, value in given.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, str) and "\0" in text:
            raise UsageError(f"{name} has a NUL, which no name of a file has: {text!r}")
        if isinstance(text, str) and (problem := of_address(name, text)):
            raise UsageError(problem, code="checkpoint-remote")
        if isinstance(text, str) and text.startswith("~"):
            raise UsageError(f"{name}={text!r}: ~ is a home to a shell alone: os.path.expanduser({text!r}) is the path")


def of_address(name: str, text: str) -> str:
    """Says what is wrong with an address of a store in the place of a path; nothing where it is a path."""
    found = _ADDRESS.match(text)
    if found is None:
        return ""
    return (
        f"{name}={text!r}: {found[0]} begins the address of a store, and this is a path of a file system that all "
        f"ranks see: take one, of a store that is mounted for example. fsspec.filesystem({found[1]!r}) copies: put("
        "folder, address, recursive=True) what was saved, get(...) before a load"
    )


def nearest(given: object, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The known name that is most like the given one, in any case of its letters.

    Args:
        cutoff: how much alike they have to be, from 0 to 1; an empty string where none is.
    """
    of_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(given).lower(), of_lower, 1, cutoff)
    return of_lower[found[0]] if found else ""
