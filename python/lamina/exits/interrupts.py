# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C on another rank: how this one knows of it."""

import re

from lamina import _lamina
from lamina.errors import PeerError, RemoteError

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C raised this error, here or on another rank."""
    return isinstance(error, KeyboardInterrupt) or interrupted_rank(error) is not None


def interrupted_rank(error: BaseException | None) -> int | None:
    """The other rank whose Ctrl-C caused this error: it came from there, or that rank was lost by it."""
    if isinstance(error, PeerError):
        lost = re.search(_lamina.LOST_BY_INTERRUPT, str(error))
        return int(lost[1]) if lost else None
    failure = getattr(error, "_failure", None)
    is_foreign = isinstance(error, RemoteError) and failure is not None and failure.type == "KeyboardInterrupt"
    return error.rank if is_foreign else None
