# SPDX-License-Identifier: Apache-2.0
"""Words for whoever started the job, on standard error. What may hold a name of somebody else's goes through here, or
through an error: see [Note: printable] in lamina/base/printable.h."""

import sys

from lamina import _lamina


def tell(line: str) -> None:
    """Says a line, unless LAMINA_LOG asks for less than "info"."""
    say(f"lamina: {line}")


def say(text: str) -> None:
    """Says a text of one line or several, as `tell`."""
    if _lamina.says_info():
        print_text(text)


def tells_details() -> bool:
    """True where LAMINA_LOG is "debug"."""
    return _lamina.says_details()


def print_text(text: str) -> None:
    """Says what was asked for, or is an error's."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with each character that a terminal would obey as "\\x1b"."""
    return _lamina.printable(text.encode(errors="backslashreplace"))


def is_printable_line(text: str) -> bool:
    """False where a terminal would not show the text as it is, or as several lines."""
    encoded = text.encode(errors="backslashreplace")
    return _lamina.printable_line(encoded).encode() == encoded
