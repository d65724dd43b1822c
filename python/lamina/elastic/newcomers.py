# SPDX-License-Identifier: Apache-2.0
"""Processes that join copies of a model which train: see [Note: newcomers] in lamina/session/door.h."""

import contextlib
import os
from collections.abc import Callable, Iterator

from lamina import _lamina


class EpochOverError(Exception):
    """Ends an epoch of a training, on all copies after the same update: newcomers come in, or copies leave."""


class Doorway:
    """The door of the job, which is at its first copy, as each rank knows it."""

    def __init__(self, engine: "_lamina.Survivors | _lamina.PartSurvivors"):
        self._engine = engine

    def is_called(self) -> bool:
        """Tells whether newcomers wait: all copies alike, between the last pass of an update and the next one."""
        return self._engine.is_called

    def end(self) -> None:
        """The training is over."""
        self._engine.close_door()

    def watch_sigterm(self) -> None:
        """From now on SIGTERM has this rank leave in order, unless the script has said what that does."""
        self._engine.watch_sigterm()

    def forget_sigterm(self) -> None:
        """It does what it did before."""
        self._engine.forget_sigterm()


@contextlib.contextmanager
def leaving_by_sigterm(doorway: Callable[[], Doorway]) -> Iterator[None]:
    """Inside, SIGTERM has this rank leave in order, unless the script has said what that does.

    Args:
        doorway: gives that of the training, which may be another one later.
    """
    doorway().watch_sigterm()
    try:
        yield
    finally:
        doorway().forget_sigterm()


def is_one() -> bool:
    """Tells whether this process is to join a job, in which it is not yet."""
    return _lamina.is_newcomer()


def is_leaving() -> bool:
    """Tells whether SIGTERM has told this rank to leave in order."""
    return _lamina.is_leaving()


def end_if_one(why: str) -> None:
    """Ends this process where it was to join a job that takes nobody in.

    Errors:
        SystemExit: that end.
    """
    _lamina.end_if_newcomer(why)


def end_if_told() -> None:
    """A rank is lost: ends this process, too, where SIGTERM has told it to leave. Perhaps the launcher ends all."""
    _lamina.end_if_told()


def take_place(place: dict[str, str]) -> None:
    """Python's copy of the environment says the place, too, which the engine has taken."""
    os.environ.pop("LAMINA_NEWCOMER", None)
    os.environ.update(place)
