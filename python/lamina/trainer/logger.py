# SPDX-License-Identifier: Apache-2.0
"""Destinations of metrics."""

from typing import Any


class Logger:
    """Gives metrics to all destinations: objects with `log_metrics(metrics, step)`.

    Args:
        destinations: of this rank.
    """

    def __init__(self, destinations: list[Any]):
        self.destinations = destinations

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Gives them numbers by name."""
        for destination in self.destinations:
            destination.log_metrics(metrics, step)
