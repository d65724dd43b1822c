# SPDX-License-Identifier: Apache-2.0
"""An error that another rank is the cause of and nobody catches: `lamina run` is told, so that it names and shows the
cause. Local rank 0, whose traceback would be on the terminal before the cause, leaves it to the launcher."""

import sys
import traceback
from types import TracebackType

from lamina import _lamina
from lamina.errors import PeerError, RemoteError
from lamina.interrupts import interrupted_rank

_previous = None


def install() -> None:
    """From now on, before any other hook that is set now."""
    global _previous
    if _previous is None:
        _previous = sys.excepthook
        sys.excepthook = _hook


def remove() -> None:
    """Ends `install`, unless somebody has put a hook of their own before this one."""
    global _previous
    if sys.excepthook is _hook:
        sys.excepthook, _previous = _previous, None


def is_consequence(error: BaseException) -> bool:
    """Whether another rank is the reason, and not its Ctrl-C."""
    if interrupted_rank(error) is not None:
        return False
    if isinstance(error, RemoteError) and hasattr(error, "rank"):
        return error.rank != _lamina.told("RANK")
    return isinstance(error, PeerError)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    told = is_consequence(error) and _lamina.report_consequence("".join(traceback.format_exception(error)))
    if not told or _lamina.told("LOCAL_RANK") != 0:
        _previous(kind, error, trace)
