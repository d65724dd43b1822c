# SPDX-License-Identifier: Apache-2.0
"""Metrics kept in memory."""

import copy
from typing import Any

from lamina.composer.loggers.destination import LoggerDestination
from lamina.composer.metric_names import MetricsByName
from lamina.errors import UsageError
from lamina.trainer import measured
from lamina.trainer.time import Timestamp


class InMemoryLogger(LoggerDestination):
    """Keeps metrics.

    Attributes:
        data: by name the values, each with its time.
        most_recent_values, most_recent_timestamps: the last ones.
        hyperparameters: by name.
    """

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Timestamp, Any]]] = MetricsByName()
        self.most_recent_values: dict[str, Any] = MetricsByName()
        self.most_recent_timestamps: dict[str, Timestamp] = MetricsByName()
        self.hyperparameters: dict[str, Any] = {}
        self.state: Any = None

    def init(self, state: Any, logger: Any) -> None:
        self.state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters |= hyperparameters

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = Timestamp() if self.state is None else self.state.timestamp
        for name, value in copy.deepcopy(metrics).items():
            self.data.setdefault(name, []).append((now, value))
            self.most_recent_values[name], self.most_recent_timestamps[name] = value, now

    def get_timeseries(self, metric: str) -> dict[str, Any]:
        """The values of a metric as an array of numpy's, and those of their times, by the names in a Timestamp."""
        import numpy

        if metric not in self.data:
            raise UsageError(f"no metric {metric!r} was logged; there are {', '.join(self.data)}")
        rows = [{metric: measured.plain(value)} | now.state_dict() for now, value in self.data[metric]]
        return {name: numpy.array([row[name] for row in rows]) for name in rows[0]}
