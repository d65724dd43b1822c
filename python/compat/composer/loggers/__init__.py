# SPDX-License-Identifier: Apache-2.0
from lamina.trainer.logger import Logger
from lamina.trainer.loggers import (
    ConsoleLogger,
    FileLogger,
    InMemoryLogger,
    LoggerDestination,
    ProgressBarLogger,
    TensorboardLogger,
    WandBLogger,
    format_log_data_value,
)

__all__ = [
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "ProgressBarLogger",
    "TensorboardLogger",
    "WandBLogger",
    "format_log_data_value",
]
