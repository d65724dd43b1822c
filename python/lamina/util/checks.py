# SPDX-License-Identifier: Apache-2.0
"""Arguments that are not what they have to be, said in the words of the argument."""

from typing import Any

from lamina.errors import UsageError


def require_booleans(**given: Any) -> None:
    """Errors: UsageError: an argument is neither True nor False; "False" would count as True."""
    for name, value in given.items():
        if type(value) is not bool:
            raise UsageError(f"{name} is True or False, not {value!r}")


def require_count(**given: Any) -> None:
    """Errors: UsageError: an argument is no integer from 1."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is an integer, at least 1, not {value!r}")


def require_positive(**given: Any) -> None:
    """Errors: UsageError: an argument is no number above 0."""
    for name, value in given.items():
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UsageError(f"{name} is a number above 0, not {value!r}")
