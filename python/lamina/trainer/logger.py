# SPDX-License-Identifier: Apache-2.0
"""A place that callbacks give numbers of a training to."""

from collections.abc import Mapping, Sequence
from typing import Any


class Logger:
    """Gives metrics and others to all destinations of this rank.

    Args:
        state: of the training; its time is that of metrics.
        destinations: a LoggerDestination, or several.
    """

    def __init__(self, state: Any, destinations: Any = ()):
        self._state = state
        self.destinations = list(destinations) if isinstance(destinations, Sequence) else [destinations]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Gives them numbers by name, after so many batches: else as many as there were."""
        step = self._state.timestamp.batch.value if step is None else step
        for destination in self.destinations:
            destination.log_metrics(dict(metrics), step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Gives them settings of the run."""
        for destination in self.destinations:
            destination.log_hyperparameters(dict(hyperparameters))

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Gives them notes for finding errors."""
        for destination in self.destinations:
            destination.log_traces(dict(traces))
