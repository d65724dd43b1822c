# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import logger
from lamina.composer.logger import Logger
from lamina.composer.loggers import (
    ConsoleLogger,
    FileLogger,
    InMemoryLogger,
    LoggerDestination,
    ProgressBarLogger,
    TensorboardLogger,
    WandBLogger,
    console_logger,
    destination,
    file_logger,
    format_log_data_value,
    in_memory_logger,
    progress_bar_logger,
    services,
)

offer(__name__, logger=logger, logger_destination=destination, console_logger=console_logger, file_logger=file_logger)
offer(__name__, in_memory_logger=in_memory_logger, progress_bar_logger=progress_bar_logger)
offer(__name__, tensorboard_logger=services, wandb_logger=services)
__getattr__ = others(__name__)

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
