# SPDX-License-Identifier: Apache-2.0
"""Destinations of metrics, and others' loggers as such."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import torch

from lamina.dist.ranks import get_global_rank
from lamina.errors import ConfigError
from lamina.trainer import checks
from lamina.trainer.events import Callback


class LoggerDestination(Callback):
    """Takes what a training tells, and hears of its events, INIT before the rest. Every rank has its own, and gets all
    of it."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Numbers by name, after so many batches."""

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Settings of a run, by name."""

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Notes for finding errors, by name."""

    def log_images(self, images: Any, name: str = "Images", *args: Any, **options: Any) -> None:
        """Images, for a destination that shows some.

        Args:
            images: an array or a tensor, or several.
            name: of them.
            args, options: what the destination takes beside.
        """

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str = "Table") -> None:
        """A table, for a destination that shows some.

        Args:
            columns: their names.
            rows: values of each row.
            name: of the table.
        """

    def can_upload_files(self) -> bool:
        """Tells whether it does something with `upload_file`."""
        return False

    def upload_file(self, state: Any, remote_file_name: str, file_path: str, *, overwrite: bool = False) -> None:
        """A file that is to be there under another name.

        Args:
            state: of the training.
            remote_file_name: its name there.
            file_path: of the file here.
            overwrite: whether one that is there may go.
        """


class LoggerAdapter(LoggerDestination):
    """Gives metrics to a `lamina.Logger`: the numbers among them, on world rank 0."""

    def __init__(self, logger: Any):
        self.logger = logger

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if get_global_rank() == 0:
            self.logger.log(step, numbers(metrics))

    def close(self, state: Any, logger: Any) -> None:
        self.logger.close()


def as_destinations(given: Any) -> list[LoggerDestination]:
    """Lists destinations as they are, and any `lamina.Logger` as one.

    Errors:
        ConfigError: something else.
    """
    return list(map(_as_destination, checks.listed(given)))


def _as_destination(given: Any) -> LoggerDestination:
    if isinstance(given, LoggerDestination):
        return given
    if all(callable(getattr(given, name, None)) for name in ("log", "close")) and not isinstance(given, type):
        return LoggerAdapter(given)
    raise ConfigError(
        f"loggers: {given!r} is none: a LoggerDestination is, and an object with log(step, values) and close()"
    )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers among metrics."""
    values = {name: value.item() if _is_number(value) else value for name, value in metrics.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def format_log_data_value(value: Any) -> str:
    """A value as text in a log."""
    if _is_number(value):
        value = value.item()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, torch.Tensor):
        return f"Tensor of shape {value.shape}"
    if isinstance(value, Mapping):
        return "{ " + "".join(f'"{name}": {format_log_data_value(each)}, ' for name, each in value.items()) + "}"
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(format_log_data_value, value)) + "]"
    return str(value)


def text_stream(given: str | TextIO) -> TextIO:
    """The stream of this name, "stdout" or "stderr", or any other as it is."""
    if hasattr(given, "write"):
        return given
    if not isinstance(given, str) or given not in ("stdout", "stderr"):
        raise ConfigError(f"stream: {given!r} is none: 'stdout' and 'stderr' are, and files")
    return getattr(sys, given)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
