# SPDX-License-Identifier: Apache-2.0
"""Text on its way to a stream."""

from collections.abc import Callable
from typing import TextIO


class Tap:
    """Hears text before a stream gets it, whoever holds the stream, until it is closed.

    Args:
        stream: such as sys.stdout.
        hear: called with each text.
    """

    def __init__(self, stream: TextIO, hear: Callable[[str], None]):
        self._stream, self._hear = stream, hear
        self._before = vars(stream).get("write")  # another one's
        self._write = stream.write
        stream.write = self._pass_on

    def _pass_on(self, text: str) -> int:
        if self._hear is not None:
            self._hear(text)
        return self._write(text)

    def close(self) -> None:
        """Hears nothing from now on. The stream has its own `write` again, unless another tap came later."""
        self._hear = None
        if vars(self._stream).get("write") != self._pass_on:
            return
        if self._before is None:
            del self._stream.write
        else:
            self._stream.write = self._before
