# SPDX-License-Identifier: Apache-2.0
"""Classes that modules get in the place of their own, while they compute with slices."""

from typing import Any

_MADE = "_lamina_made"  # of such a class


def made(kind: type, bases: tuple[type, ...], **own: Any) -> type:
    """A class that stands for another one, under its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, _MADE: True}
    return type(kind.__name__, bases, names | own)


def is_made(kind: type) -> bool:
    """True for a class that stands for another one."""
    return _MADE in vars(kind)
