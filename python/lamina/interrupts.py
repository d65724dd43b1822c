# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C on another rank: this one ends as if it had been its own, without a traceback that tells nobody anything."""

import sys
from types import TracebackType

from lamina.errors import RemoteError

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
    failure = getattr(error, "_failure", None)
    foreign = isinstance(error, RemoteError) and failure is not None and failure.type == "KeyboardInterrupt"
    return foreign or isinstance(error, KeyboardInterrupt)


_previous = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, RemoteError) or not is_interrupt(error):
        _previous(kind, error, trace)
        return
    print(f"lamina: rank {error.rank} was interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
