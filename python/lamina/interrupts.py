# SPDX-License-Identifier: Apache-2.0
"""Errors of other ranks that nobody catches: this one ends without a traceback that hides the one that tells something.

On Ctrl-C on another rank this one ends as if it had been its own. Of any other error `lamina run` is told that it is a
consequence; local rank 0, whose traceback would be on the terminal before the first cause, leaves it to the launcher.
"""

import re
import sys
import traceback
from types import TracebackType

from lamina import _lamina
from lamina.errors import PeerError, RemoteError

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


def install() -> None:
    """From now on an error of another rank that nobody catches ends this process as described above, an interrupt with
    the code `INTERRUPTED`."""
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


def is_consequence(error: BaseException) -> bool:
    """Whether another rank is the reason."""
    if isinstance(error, RemoteError) and hasattr(error, "rank"):
        return error.rank != _lamina.told("RANK")
    return isinstance(error, PeerError)


_previous = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = interrupted_rank(error)
    if rank is None:
        told = is_consequence(error) and _lamina.report_consequence("".join(traceback.format_exception(error)))
        if not told or _lamina.told("LOCAL_RANK") != 0:
            _previous(kind, error, trace)
        return
    print(f"lamina: rank {rank} was interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
