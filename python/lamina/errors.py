# SPDX-License-Identifier: Apache-2.0
"""The errors of lamina, by culprit. The first line of a message says whom it concerns, what happened and what to do."""

import builtins

from lamina import _lamina


class Error(RuntimeError):
    """Any error that lamina itself raises.

    Attributes:
        code: the stable name of an error that docs/errors.md tells more of than the message can, such as
            "step-mismatch": the first line of the message ends with it in brackets. The last line is the command that
            prints what the page says. "" for all others.
    """

    code: str = ""

    def __init__(self, *arguments: object, code: str = ""):
        if arguments and (code or isinstance(arguments[0], str)):
            # Names of files and words of other ranks may be in it: see [Note: printable] in lamina/base/printable.h.
            text = str(arguments[0]).encode(errors="backslashreplace")
            arguments = (_lamina.coded(text, code), *arguments[1:])
        if code:
            self.code = code
        super().__init__(*arguments)


class ConfigError(Error, ValueError):
    """The configuration is wrong; nothing was started."""


class UsageError(Error):
    """The caller used the library in a way it does not allow."""


class DesyncError(UsageError):
    """Ranks that have to make the same calls in the same order did not."""


class PeerError(Error, ConnectionError):
    """Another rank is gone: its process ended or its connection broke.

    Attributes:
        lost_rank: the world rank that is gone, -1 when unknown.
        cause: why, as a clause: "its process ended"; "" when unknown.
    """

    lost_rank: int = -1
    cause: str = ""


class TimeoutError(Error, builtins.TimeoutError):
    """A live rank did not answer before the deadline."""


class FormatError(Error):
    """Bytes that are not what the format says."""


class FileError(Error, OSError):
    """The file system refused: it names what was to be done, the path, and why; `errno` says it, too."""


class CancelledError(Error):
    """The step ended because of an error elsewhere; that error is the one to look at."""


class InternalError(Error):
    """A bug of lamina: nothing that a program, its configuration or the system does leads here. Please report it."""

    @classmethod
    def found(cls, what: str) -> "InternalError":
        """The error that says that `what` was found: "an object that nobody holds"."""
        return cls(f"a bug of lamina: {what}; please report it, with what all ranks have logged")


class RemoteError(Error):
    """An exception that another rank raised.

    Where the original's type allows it, the error is also of that type: `except KeyError` catches a KeyError of any
    rank, and `except RemoteError` all that came from others.

    Attributes:
        rank: the world rank that raised it, -1 when unknown.
        remote_traceback: the traceback on that rank, as text.
    """

    rank: int = -1
    remote_traceback: str = ""


def said(name: str, *values: object) -> str:
    """A text that the C++ face says, too, by its name in lamina/faces/sayings.h, with its values."""
    return _lamina.said(name, list(map(str, values)))[0]


def refusal(name: str, *values: object, kind: type[Error] = UsageError) -> Error:
    """An error that the C++ face raises, too: a text with its code."""
    text, code = _lamina.said(name, list(map(str, values)))
    return kind(text, code=code)
