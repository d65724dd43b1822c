# SPDX-License-Identifier: Apache-2.0
"""Destinations of what a training tells: files, memory, a console, and services."""

from lamina.composer.loggers.console_logger import ConsoleLogger
from lamina.composer.loggers.destination import (
    LoggerAdapter,
    LoggerDestination,
    as_destinations,
    format_log_data_value,
)
from lamina.composer.loggers.file_logger import FileLogger
from lamina.composer.loggers.in_memory_logger import InMemoryLogger
from lamina.composer.loggers.progress_bar_logger import ProgressBarLogger
from lamina.composer.loggers.services import TensorboardLogger, WandBLogger

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
