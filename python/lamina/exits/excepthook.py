# SPDX-License-Identifier: Apache-2.0
"""An error that nobody catches, on every rank of a pipeline: its traceback is shown once, by the rank that raised it,
and all end with the exit code that Python gives it there."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lamina import _lamina
from lamina.errors import PeerError, RemoteError
from lamina.exits.device_errors import explain
from lamina.exits.failures import INTERRUPTED, Failure, exit_argument, interrupted_rank, sendable
from lamina.exits.frames import hide_ours
from lamina.util.told import printable

# How long the others wait for the rank that raised to end: whoever started the ranks is to find that one first.
RAISER_ENDS_S = 5.0
STARTER_ENDS_S = 0.5  # and for that somebody, who may end them without another word
# How long threads of the user's may go on after such an error: Python, and so the other ranks, would wait for ever.
THREADS_END_S = 10.0


def install(session: _lamina.Session | None = None) -> None:
    """From now on this process ends so, until `remove`. Without a session nobody is waited for."""
    global _installed, _session
    _session = session or _session
    if sys.excepthook is not _installed:
        _remove_hook()
        while isinstance(sys.excepthook, _Hook):  # of an earlier job, and handed on by one that is gone
            sys.excepthook = sys.excepthook.previous
        _installed = sys.excepthook = _Hook(sys.excepthook)


def add_remedy(find: Callable[[BaseException], str | None]) -> None:
    """Has `find` look at each error that nobody catches. What it says is shown below the traceback."""
    _remedies.append(find)


def remove() -> None:
    """Ends `install`."""
    global _session
    _session = None
    _remove_hook()


def _remove_hook() -> None:
    """Ours is not called any more, or only hands on where somebody has put another one before it, as torch does for a
    process group: that one stays before the next one of ours, too."""
    global _installed
    if _installed is None:
        return
    _installed.active = False
    if sys.excepthook is _installed:
        sys.excepthook = _installed.previous
    _installed = None


def end_without_collecting() -> None:
    """Has this process, which others wait for, end soon: looking for cycles is four fifths of what one with torch takes
    to end."""
    gc.freeze()


class _Hook:
    """Handles an error that nobody catches, or hands it on."""

    def __init__(self, previous: Callable[..., Any]):
        self.previous = previous
        self.active = True

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.active:
            _end(self.previous, kind, error, trace)
        else:
            self.previous(kind, error, trace)


_installed: _Hook | None = None
_session: _lamina.Session | None = None
_remedies: list[Callable[[BaseException], str | None]] = []


def _show(
    previous: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    previous(kind, error, trace)
    for line in filter(None, (find(error) for find in _remedies)):
        _say(f"lamina: {line}")


def _end(
    previous: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    explain(error)
    session = _session
    if session is not None and session.size > 1:
        end_without_collecting()
        threading.Thread(target=_leave_threads, daemon=True).start()
    hide_ours(error)
    trace = error.__traceback__
    interrupted = interrupted_rank(error)
    failure = getattr(error, "_failure", None) if isinstance(error, RemoteError) else None
    if isinstance(error, PeerError):
        failure = None  # the rank that is its cause has ended already
    told = interrupted is None and _tell_launcher(error)
    if session is not None and failure is not None and failure.rank == session.rank:
        _end_as_raiser(previous, kind, error, trace, failure)
    elif interrupted is not None:
        _end_as_interrupted(session, interrupted)
    elif session is None or failure is None:
        if not (told and _lamina.told("LOCAL_RANK") == 0):  # the launcher shows it after the first cause, if at all
            _show(previous, kind, error, trace)
    elif session.loss(failure.rank, RAISER_ENDS_S):
        _end_as_other(failure)
    else:  # it goes on without us
        previous(kind, error, trace)


def _leave_threads() -> None:
    """Ends the process, should threads that are no daemons keep it from ending by itself."""
    time.sleep(THREADS_END_S)
    others = [thread.name for thread in threading.enumerate() if not thread.daemon]
    others.remove(threading.main_thread().name)
    if others:
        lasted = f"{THREADS_END_S:.0f} s after its error, in which threads still ran: {', '.join(others)}"
        print(f"lamina: ended {lasted}", file=sys.__stderr__, flush=True)
        os._exit(1)


def _tell_launcher(error: BaseException) -> bool:
    """Tells `lamina run`, where there is one, of an error whose reason is another rank: that one is to be named."""
    own = _session.rank if _session is not None else _lamina.told("RANK")
    foreign = isinstance(error, RemoteError) and getattr(error, "rank", own) != own
    if not foreign and not isinstance(error, PeerError):
        return False
    return _lamina.report_consequence(sendable("".join(traceback.format_exception(error))))


def _take_stderr_back() -> None:
    """For functions that never return: a hook around ours may keep until then what is written to sys.stderr, as torch's
    does, of a process group made since."""
    if sys.excepthook is not _installed:
        sys.stderr = sys.__stderr__


def _end_as_interrupted(session: _lamina.Session | None, rank: int) -> None:
    if session is not None:
        session.loss(rank, RAISER_ENDS_S)
        time.sleep(STARTER_ENDS_S)
    _take_stderr_back()
    _say(f"lamina: rank {rank} was interrupted")
    sys.exit(INTERRUPTED)


def _end_as_raiser(
    previous: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    failure: Failure,
) -> None:
    """It was raised in a thread that served another rank: what the user knows begins there."""
    _take_stderr_back()
    if failure.type != "SystemExit":
        known = previous is sys.__excepthook__
        words = failure.traceback.rstrip()
        if failure.message not in words:  # an error of the engine has no traceback
            words = f"{failure.type}: {failure.message}\n{words}".rstrip()
        _say(words) if known else previous(kind, error, trace)
    sys.exit(exit_argument(failure))


def _end_as_other(failure: Failure) -> None:
    argument = exit_argument(failure)
    code = argument if isinstance(argument, int) else int(argument is not None)
    time.sleep(STARTER_ENDS_S)
    _take_stderr_back()
    if code != 0:
        _say(f"lamina: {_summary(failure)}")
    sys.exit(code)


def _summary(failure: Failure) -> str:
    what = f"{failure.type}: {failure.message}" if failure.message else failure.type
    return f"rank {failure.rank} raised {what.splitlines()[0]}; its traceback is in what that rank wrote"


def _say(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)
