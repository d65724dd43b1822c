# SPDX-License-Identifier: Apache-2.0
"""Metrics on a console, as lines."""

from typing import Any, TextIO

from lamina.composer.loggers.destination import LoggerDestination, format_log_data_value, text_stream
from lamina.dist.ranks import get_global_rank
from lamina.trainer.time import EPOCH_OR_BATCH, Time, TimeUnit, named_time


class ConsoleLogger(LoggerDestination):
    """Prints metrics, on world rank 0.

    Args:
        log_interval: after how many epochs or batches; an int is epochs. After the first one, too.
        stream: "stdout", "stderr" or a file.
        log_traces: whether it prints traces, too.

    Errors:
        ConfigError: an interval in another unit, another stream.
    """

    def __init__(
        self, log_interval: int | str | Time = "1ba", stream: str | TextIO = "stderr", log_traces: bool = False
    ):
        self.log_interval = named_time("console_log_interval", log_interval, True, EPOCH_OR_BATCH)
        self.stream, self.should_log_traces = text_stream(stream), log_traces
        self._metrics: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._metrics |= metrics

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._print("Config:", "", hyperparameters)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self.should_log_traces:
            self._print("[trace]:", "", traces)

    def batch_end(self, state: Any, logger: Any) -> None:
        self._after(TimeUnit.BATCH, state.timestamp.batch.value, state)

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._after(TimeUnit.EPOCH, state.timestamp.epoch.value, state)

    def eval_end(self, state: Any, logger: Any) -> None:
        self._print(f"[Eval on {state.dataloader_label}]:", "Eval ", state.eval_metric_values)

    def _after(self, unit: TimeUnit, count: int, state: Any) -> None:
        if self.log_interval.unit is unit and (count == 1 or count % self.log_interval.value == 0):
            metrics, self._metrics = self._metrics, {}
            self._print(f"{progress_of(state)}:", "Train ", metrics)

    def _print(self, head: str, kind: str, values: dict[str, Any]) -> None:
        if get_global_rank() == 0:
            lines = [f"\t {kind}{name}: {format_log_data_value(value)}" for name, value in values.items()]
            print("\n".join([head, *lines]), file=self.stream, flush=True)


def progress_of(state: Any) -> str:
    """How far a training is."""
    now, most = state.timestamp, state.max_duration
    if most is not None and most.unit is not TimeUnit.EPOCH:
        return f"[{most.unit.name.lower()}={now.get(most.unit).value}/{most.value}]"
    length = "" if state.dataloader_len is None else f"/{state.dataloader_len}"
    epoch, batch = now.epoch.value, now.batch_in_epoch.value
    if batch == 0 and epoch:  # at an epoch's end the next one is counted
        epoch, batch = epoch - 1, state.dataloader_len or 0
    return f"[epoch={epoch + 1}][batch={batch}{length}]"
