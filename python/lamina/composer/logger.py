# SPDX-License-Identifier: Apache-2.0
"""A place that callbacks give numbers of a training to."""

from collections.abc import Mapping, Sequence
from typing import Any

from lamina.dist.ranks import get_global_rank
from lamina.util.told import tell


class Logger:
    """Gives metrics and others to all destinations of this rank.

    Args:
        state: of the training; its time is that of metrics.
        destinations: a LoggerDestination, or several.
    """

    def __init__(self, state: Any, destinations: Any = ()):
        self._state, self._told = state, False
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

    def log_images(self, images: Any, name: str = "Images", *args: Any, **options: Any) -> None:
        """Gives them images; those that show none leave them.

        Args:
            images: an array or a tensor, or several.
            name: of them.
            args, options: what a destination takes beside.
        """
        for destination in self.destinations:
            destination.log_images(images, name, *args, **options)

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str = "Table") -> None:
        """Gives them a table; those that show none leave it.

        Args:
            columns: their names.
            rows: values of each row.
            name: of the table.
        """
        for destination in self.destinations:
            destination.log_table(columns, rows, name)

    def has_file_upload_destination(self) -> bool:
        """Tells whether one of them uploads files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def upload_file(self, remote_file_name: str, file_path: str, *, overwrite: bool = False) -> None:
        """Gives them a file to upload. Where none does, it stays where it is, and a line says so.

        Args:
            remote_file_name: its name there.
            file_path: of the file here.
            overwrite: whether one that is there may go.
        """
        if not self.has_file_upload_destination() and not self._told and get_global_rank() == 0:
            tell(f"{file_path}: no logger uploads files, so they stay where they are")
            self._told = True
        for destination in self.destinations:
            destination.upload_file(self._state, remote_file_name, file_path, overwrite=overwrite)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Gives them notes for finding errors."""
        for destination in self.destinations:
            destination.log_traces(dict(traces))
