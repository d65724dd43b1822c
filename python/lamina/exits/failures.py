# SPDX-License-Identifier: Apache-2.0
"""Exceptions as values that travel between ranks, and back; and which of them Ctrl-C on another rank has caused."""

import pickle
import sys
import traceback
from typing import NamedTuple

from lamina import _lamina
from lamina.errors import PeerError, RemoteError
from lamina.exits.device_errors import explain
from lamina.exits.frames import hide_ours, script_frames
from lamina.util.told import printable

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


class Failure(NamedTuple):
    """An exception as it travels."""

    type: str
    message: str
    traceback: str
    rank: int
    pickled: bytes | None


def describe(exception: BaseException, rank: int) -> tuple[str, str, str, int, bytes | None]:
    """The failure that `exception`, met on `rank`, is. One that came from another rank stays the one it was, and says
    where the script of `rank` met it."""
    failure = getattr(exception, "_failure", None)
    if isinstance(exception, RemoteError) and failure is not None:
        return tuple(failure._replace(traceback=_met(exception, rank, failure)))
    explain(exception)
    hide_ours(exception)
    kind = type(exception)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(exception))
    return name, sendable(_message(exception)), sendable(text), rank, _pickled(exception)


def sendable(text: str) -> str:
    """`text` in characters that have bytes: what in the name of a file is no UTF-8 is escaped."""
    return text.encode(errors="backslashreplace").decode()


def rebuild(type: str, message: str, traceback: str, rank: int, pickled: bytes | None) -> RemoteError:
    """The inverse of `describe`: a RemoteError that is also of the original's type where that can be had here."""
    failure = Failure(type, message, traceback, rank, pickled)
    error = _typed(failure)
    if error is None:
        error = RemoteError(f"{type}: {message}")
    error._failure = failure
    error.rank = rank
    error.remote_traceback = traceback
    if sys.version_info >= (3, 11):
        error.add_note(_note(failure))
    return error


def exit_argument(failure: Failure) -> object:
    """Returns what `sys.exit` is given to end a process as Python ends one in which nobody catches the failure."""
    if failure.type == "KeyboardInterrupt":
        return INTERRUPTED
    if failure.type != "SystemExit":
        return 1
    try:
        _, arguments, *_ = pickle.loads(failure.pickled)
        return SystemExit(*arguments).code
    except Exception:
        return failure.message


def _note(failure: Failure) -> str:
    words = _lamina.without_hints(failure.traceback).rstrip()  # the message before the note has it
    return printable(f"raised on rank {failure.rank}, where the traceback was:\n{words}")


def _met(exception: BaseException, rank: int, failure: Failure) -> str:
    """The failure's traceback, after the lines of the script that called what has failed."""
    lines = sendable(script_frames(exception))
    if not lines:
        return failure.traceback
    return (
        f"On rank {rank} (most recent call last):\n{lines}which met this of rank {failure.rank}:\n{failure.traceback}"
    )


def _message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:
        return "(its message could not be had)"


def _pickled(exception: BaseException) -> bytes | None:
    """Its class, the arguments of its built-in part (see `_builtin`) and its attributes: what can be brought back
    without its __init__, which may ask for anything. None when that cannot be pickled."""
    kind = type(exception)
    _, *parts = _builtin(kind).__reduce__(exception)
    for attempt in ((kind, *parts), (kind, *parts[:1]), (kind, (_message(exception),))):
        try:
            return pickle.dumps(attempt)
        except Exception:
            continue  # with less of it
    return None


def _typed(failure: Failure) -> RemoteError | None:
    """The failure as an instance of a class derived from RemoteError and its own type; None when there is no such."""
    try:
        kind, arguments, *state = pickle.loads(failure.pickled)
        # A foreign SystemExit or KeyboardInterrupt must not end this process as if it were its own.
        if not issubclass(kind, Exception):
            return None
        derived = type(kind.__name__, (_TypedRemoteError, kind), {"_original": kind, "__module__": kind.__module__})
        builtin = _builtin(kind)
        # MemoryError's layout is BaseException's, which is the one that makes instances of `derived` then.
        new = BaseException.__new__ if builtin is MemoryError else builtin.__new__
        error = new(derived, *arguments)
        builtin.__init__(error, *arguments)
        if state:
            error.__setstate__(state[0])
    except Exception:
        return None
    return error


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    """The built-in class that the C part of an exception (args, errno, ...) belongs to."""
    while kind.__module__ != "builtins":
        kind = kind.__base__
    return kind


class _TypedRemoteError(RemoteError):
    _original: type[Exception]
    _failure: Failure

    def __str__(self) -> str:
        text = self._original.__str__(self)
        # Before Python 3.11 exceptions have no notes.
        return text if sys.version_info >= (3, 11) else f"{text}\n{_note(self._failure)}"

    def __reduce__(self):
        return rebuild, tuple(self._failure)


def is_interrupt(error: BaseException | None) -> bool:
    """True where Ctrl-C raised this error, here or on another rank."""
    return isinstance(error, KeyboardInterrupt) or interrupted_rank(error) is not None


def interrupted_rank(error: BaseException | None) -> int | None:
    """The other rank whose Ctrl-C caused this error: it came from there, or that rank was lost by it."""
    if isinstance(error, PeerError):
        return error.lost_rank if error.cause == _lamina.INTERRUPTED else None
    failure = getattr(error, "_failure", None)
    is_foreign = isinstance(error, RemoteError) and failure is not None and failure.type == "KeyboardInterrupt"
    return error.rank if is_foreign else None
