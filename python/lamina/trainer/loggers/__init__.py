# SPDX-License-Identifier: Apache-2.0
"""Destinations of what a training tells: files, memory, a console, and services."""

from lamina.trainer.loggers.console_logger import ConsoleLogger
from lamina.trainer.loggers.destination import (
    LoggerAdapter,
    LoggerDestination,
    as_destinations,
    format_log_data_value,
)
from lamina.trainer.loggers.file_logger import FileLogger
from lamina.trainer.loggers.in_memory_logger import InMemoryLogger
from lamina.trainer.loggers.progress_bar_logger import ProgressBarLogger
from lamina.trainer.loggers.services import TensorboardLogger, WandBLogger

__all__ = [
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "LoggerAdapter",
    "LoggerDestination",
    "ProgressBarLogger",
    "TensorboardLogger",
    "WandBLogger",
    "as_destinations",
    "format_log_data_value",
]
