# SPDX-License-Identifier: Apache-2.0
"""The engine: it tells algorithms and callbacks of a training's events."""

import sys
from typing import Any

from lamina.composer.composers_names import OF_ENGINE, Elsewhere
from lamina.trainer.events import Callback, Event
from lamina.util.told import tell


def _logs(callback: Callback) -> bool:
    return hasattr(callback, "log_metrics")


class Engine(Elsewhere):
    """Tells algorithms and callbacks of events.

    Args:
        state: of the training; it has both.
        logger: they get it.
    """

    _elsewhere = OF_ENGINE
    state, logger = property(lambda self: self._state), property(lambda self: self._logger)

    def __init__(self, state: Any, logger: Any):
        self._state, self._logger = state, logger
        self._closed = False

    def run_event(self, event: Event | str) -> None:
        """Tells all of it: algorithms first, then callbacks, then loggers, which get what those log. At INIT, where
        callbacks are put in that order, loggers begin before the others."""
        event = Event(event)
        for algorithm in self._state.algorithms:
            if algorithm.match(event, self._state):
                algorithm.apply(event, self._state, self._logger)
        callbacks = self._state.callbacks
        if event is Event.INIT:
            callbacks.sort(key=_logs)
            callbacks = sorted(callbacks, key=_logs, reverse=True)
        for callback in callbacks:
            callback.run_event(event, self._state, self._logger)

    def close(self) -> None:
        """Closes all callbacks, once. The first error is raised when all have been; where there is one already, theirs
        are lines."""
        if self._closed:
            return
        self._closed, errors = True, []
        calls = [(callback.close, (self._state, self._logger)) for callback in self._state.callbacks]
        for call, arguments in [*calls, *((callback.post_close, ()) for callback in self._state.callbacks)]:
            try:
                call(*arguments)
            except Exception as error:
                errors.append(error)
        if errors and sys.exc_info()[1] is None:
            raise errors[0]
        for error in errors:
            tell(f"a callback could not be closed: {type(error).__name__}: {error}")
