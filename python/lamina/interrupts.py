# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C on another rank: this one ends as if it had been its own, without a traceback that tells nobody anything."""

import re
import sys
from types import TracebackType

from lamina.errors import PeerError, RemoteError

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


def install() -> None:
    """From now on an interrupt of another rank that nobody catches ends this process with `INTERRUPTED`."""
    global _previous
    if sys.excepthook is not _hook:
        _previous = sys.excepthook
        sys.excepthook = _hook


def remove() -> None:
    """Ends `install`, unless somebody has put a hook of their own before this one."""
    if sys.excepthook is _hook:
        sys.excepthook = _previous


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C raised this error, here or on another rank."""
    return isinstance(error, KeyboardInterrupt) or interrupted_rank(error) is not None


def interrupted_rank(error: BaseException | None) -> int | None:
    """The other rank whose Ctrl-C caused this error: it came from there, or that rank was lost by it."""
    if isinstance(error, PeerError):
        lost = re.search(r"\brank (\d+) is lost: it was interrupted\b", str(error))
        return int(lost[1]) if lost else None
    failure = getattr(error, "_failure", None)
    is_foreign = isinstance(error, RemoteError) and failure is not None and failure.type == "KeyboardInterrupt"
    return error.rank if is_foreign else None


_previous = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = interrupted_rank(error)
    if rank is None:
        _previous(kind, error, trace)
        return
    print(f"lamina: rank {rank} was interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
