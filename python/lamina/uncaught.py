# SPDX-License-Identifier: Apache-2.0
"""An error that nobody catches, on every rank of a pipeline: its traceback is shown once, by the rank that raised it,
and all end with the exit code that Python gives it there."""

from __future__ import annotations

import gc
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from lamina import interrupts
from lamina.errors import PeerError, RemoteError
from lamina.failures import Failure, exit_argument

if TYPE_CHECKING:
    from lamina import _lamina

# How long the others wait for the rank that raised to end: whoever started the ranks is to find that one first.
RAISER_ENDS_S = 5.0
# And how long for that somebody, who may end them without another word.
STARTER_ENDS_S = 0.5


def install(session: _lamina.Session) -> None:
    """From now on this process ends so, until `remove`."""
    global _previous, _session
    _session = session
    if sys.excepthook is not _hook:
        _previous = sys.excepthook
        sys.excepthook = _hook


def remove() -> None:
    """Ends `install`, unless somebody has put a hook of their own before this one."""
    global _session
    _session = None
    if sys.excepthook is _hook:
        sys.excepthook = _previous


_previous = sys.excepthook
_session: _lamina.Session | None = None


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    session = _session
    if session is not None and session.size > 1:
        gc.freeze()  # the others wait: four fifths of what a process with torch takes to end is looking for cycles
    interrupted = interrupts.interrupted_rank(error)
    failure = getattr(error, "_failure", None) if isinstance(error, RemoteError) else None
    if isinstance(error, PeerError):
        failure = None  # the rank that is its cause has ended already
    if session is None or (interrupted is None and failure is None):
        _previous(kind, error, trace)
    elif failure is not None and failure.rank == session.rank:
        _end_as_raiser(kind, error, trace, failure)
    elif interrupted is not None:
        session.loss(interrupted, RAISER_ENDS_S)
        time.sleep(STARTER_ENDS_S)
        _say(f"lamina: rank {interrupted} was interrupted")
        sys.exit(interrupts.INTERRUPTED)
    elif session.loss(failure.rank, RAISER_ENDS_S):
        _end_as_other(failure)
    else:  # it goes on without us
        _previous(kind, error, trace)


def _end_as_raiser(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, failure: Failure
) -> None:
    """It was raised in a thread that served another rank: what the user knows begins there."""
    if failure.type != "SystemExit":
        known = _previous is sys.__excepthook__
        _say(failure.traceback.rstrip()) if known else _previous(kind, error, trace)
    sys.exit(exit_argument(failure))


def _end_as_other(failure: Failure) -> None:
    argument = exit_argument(failure)
    code = argument if isinstance(argument, int) else int(argument is not None)
    time.sleep(STARTER_ENDS_S)
    if code != 0:
        _say(f"lamina: {_summary(failure)}")
    sys.exit(code)


def _summary(failure: Failure) -> str:
    what = f"{failure.type}: {failure.message}" if failure.message else failure.type
    return f"rank {failure.rank} raised {what.splitlines()[0]}; its traceback is in what that rank wrote"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
