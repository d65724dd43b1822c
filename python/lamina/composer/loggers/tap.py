# SPDX-License-Identifier: Apache-2.0
"""Text on its way to a stream."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TextIO

from lamina.util.settings import replace


class Tap:
    """Hears text before a stream gets it, whoever holds the stream, until it is closed.

    Args:
        stream: such as sys.stdout.
        hear: called with each text.
    """

    def __init__(self, stream: TextIO, hear: Callable[[str], None]):
        self._hear, self._write, self._undo = hear, stream.write, ExitStack()
        replace(self._undo, stream, "write", self._pass_on, stays=True)

    def _pass_on(self, text: str) -> int:
        if self._hear is not None:
            self._hear(text)
        return self._write(text)

    def close(self) -> None:
        """Hears nothing from now on. The stream has its own `write` again, unless another tap came later."""
        self._hear = None
        self._undo.close()
