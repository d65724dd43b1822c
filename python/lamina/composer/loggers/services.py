# SPDX-License-Identifier: Apache-2.0
"""Programs and services that draw metrics."""

import os
import sys
from typing import Any

from lamina.composer.loggers.destination import LoggerDestination, format_log_data_value, numbers
from lamina.dist.ranks import get_global_rank
from lamina.errors import ConfigError
from lamina.trainer import checks


class TensorboardLogger(LoggerDestination):
    """TensorBoard's event files, in `log_dir/run_name`: `pip install lamina[tensorboard]`.

    Args:
        log_dir: where all runs are; else "tensorboard_logs".
        flush_interval: after how many batches they are on the disk.
        rank_zero_only: whether the other ranks write none.

    Errors:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | None = None, flush_interval: int = 100, rank_zero_only: bool = True):
        try:
            from torch.utils import tensorboard
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed: pip install lamina[tensorboard]") from error
        self.log_dir = log_dir or "tensorboard_logs"
        self.flush_interval = checks.number("TensorboardLogger: flush_interval", flush_interval, 1, whole=True)
        self.writer, self._new_writer, self._rank_zero_only = None, tensorboard.SummaryWriter, rank_zero_only

    def init(self, state: Any, logger: Any) -> None:
        if get_global_rank() == 0 or not self._rank_zero_only:
            self.writer = self._new_writer(os.path.join(self.log_dir, state.run_name))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in numbers(metrics).items() if self.writer is not None else ():
            self.writer.add_scalar(name, value, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        for name, value in hyperparameters.items() if self.writer is not None else ():
            self.writer.add_text(name, format_log_data_value(value))

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value % self.flush_interval == 0:
            self._flush(state, logger)

    def _flush(self, state: Any, logger: Any) -> None:
        if self.writer is not None:
            self.writer.flush()

    epoch_end = eval_end = fit_end = _flush

    def close(self, state: Any, logger: Any) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WandBLogger(LoggerDestination):
    """A run of Weights & Biases: `pip install wandb`.

    Args:
        project, group, name, entity, tags: of the run; its name else that of the Trainer's.
        log_artifacts: False; files are not uploaded.
        rank_zero_only: whether world rank 0 alone has a run; else each has one of its own, in one group.
        init_kwargs: others of `wandb.init`.

    Errors:
        ConfigError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: dict[str, Any] | None = None,
    ):
        if log_artifacts:
            raise ConfigError("WandBLogger: log_artifacts: files are not uploaded")
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("wandb is not installed: pip install wandb") from error
        given = {"project": project, "group": group, "name": name, "entity": entity, "tags": tags}
        self._options = dict(init_kwargs or {}) | {key: value for key, value in given.items() if value is not None}
        self.run, self._new_run, self._rank_zero_only = None, wandb.init, rank_zero_only

    def init(self, state: Any, logger: Any) -> None:
        options = {"name": state.run_name} | self._options
        if not self._rank_zero_only:
            options = {"group": options["name"]} | options | {"name": f"{options['name']}-rank{get_global_rank()}"}
        if get_global_rank() == 0 or not self._rank_zero_only:
            self.run = self._new_run(**options)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.run is not None:
            self.run.log(numbers(metrics), step=step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self.run is not None:
            self.run.config.update(hyperparameters)

    def close(self, state: Any, logger: Any) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
            self.run = None
