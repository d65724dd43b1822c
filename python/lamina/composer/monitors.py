# SPDX-License-Identifier: Apache-2.0
"""Callbacks that measure a training, or end it early. All ranks have the same ones, and all get the same numbers."""

import collections
import math
import resource
from collections.abc import Callable
from typing import Any

import torch

from lamina.composer.adam_metrics import AdamMetrics
from lamina.composer.metric_names import MetricsByName
from lamina.composer.optimizers import DecoupledAdamW
from lamina.dist.ranks import get_global_rank
from lamina.errors import ConfigError
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, device
from lamina.torch_patches import clipping
from lamina.trainer import checks, measured
from lamina.trainer.events import Callback
from lamina.trainer.time import EPOCH_OR_BATCH, Time, Timestamp, TimeUnit, named_time
from lamina.util.told import tell


class LRMonitor(Callback):
    """Logs the learning rates that the next batch has: `lr-AdamW/group0`, ..."""

    def batch_end(self, state: Any, logger: Any) -> None:
        for optimizer in state.optimizers:
            rates = {
                f"lr-{type(optimizer).__name__}/group{number}": float(group["lr"])
                for number, group in enumerate(optimizer.param_groups)
            }
            logger.log_metrics(rates)


class SpeedMonitor(Callback):
    """Logs `throughput/samples_per_sec`, of all ranks together over the last batches, and `wall_clock/train`, `val` and
    `total` in seconds of rank 0's clock.

    Args:
        window_size: over how many batches.
    """

    def __init__(self, window_size: int = 100):
        self.window_size = checks.number("SpeedMonitor: window_size", window_size, 1, whole=True)
        self.total_eval_wct = 0.0
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=window_size + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"marks": list(self._marks), "total_eval_wct": self.total_eval_wct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._marks.extend(map(tuple, state["marks"]))
        self.total_eval_wct = state["total_eval_wct"]

    def fit_start(self, state: Any, logger: Any) -> None:
        if not self._marks:
            self._mark(state)

    def batch_end(self, state: Any, logger: Any) -> None:
        self._mark(state)
        (first_s, first), (now_s, now) = self._marks[0], self._marks[-1]
        if len(self._marks) > self.window_size and now_s > first_s:
            logger.log_metrics({"throughput/samples_per_sec": (now - first) / (now_s - first_s)})
        clocks = {"train": now_s, "val": self.total_eval_wct, "total": now_s + self.total_eval_wct}
        logger.log_metrics({f"wall_clock/{name}": seconds for name, seconds in clocks.items()})

    def eval_end(self, state: Any, logger: Any) -> None:
        self.total_eval_wct += state.eval_timestamp.total_wct.total_seconds()

    def _mark(self, state: Any) -> None:
        self._marks.append((state.timestamp.total_wct.total_seconds(), state.timestamp.sample.value))


_MEMORY = {
    "allocation.all.allocated": "alloc_requests",
    "allocation.all.freed": "free_requests",
    "allocated_bytes.all.allocated": "allocated_mem",
    "active_bytes.all.current": "active_mem",
    "inactive_split_bytes.all.current": "inactive_mem",
    "reserved_bytes.all.current": "reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


class MemoryMonitor(Callback):
    """Logs what torch's allocator says of the rank's accelerator, `memory/active_mem` for example, and
    `memory/peak_process_mem`, the most bytes that a process has had on its host. Each is that of the rank with the
    most."""

    def after_train_batch(self, state: Any, logger: Any) -> None:
        own = {"peak_process_mem": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if (there := device()).type != "cpu":
            statistics = torch.accelerator.memory_stats(there)
            own |= {name: statistics[key] for key, name in _MEMORY.items() if key in statistics}
        ranks = allgather(own, WORLD)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        logger.log_metrics({f"memory/{name}": max(rank.get(name, 0) for rank in ranks) for name in names})


class OptimizerMonitor(Callback):
    """Logs norms of gradients as the optimizer gets them, without the loss scale: `l2_norm/grad/NAME` of each
    parameter, and `l2_norm/grad/global`. Over shards and partitions each takes an exchange.

    Args:
        log_optimizer_metrics: whether the moments and updates of DecoupledAdamW are measured, too.
    """

    def __init__(self, log_optimizer_metrics: bool = True):
        self.log_optimizer_metrics = checks.flag("OptimizerMonitor: log_optimizer_metrics", log_optimizer_metrics)
        self._norms: dict[str, torch.Tensor] = {}
        self._of_updates: AdamMetrics | None = None

    def fit_start(self, state: Any, logger: Any) -> None:
        (optimizer,) = state.optimizers
        if self.log_optimizer_metrics and isinstance(optimizer, DecoupledAdamW) and self._of_updates is None:
            self._of_updates = AdamMetrics(optimizer)

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self._norms = {name: clipping.grad_norm([each], 2.0, False, None) for name, each in _trained(state)}

    def batch_end(self, state: Any, logger: Any) -> None:
        metrics = {f"l2_norm/grad/{name}": norm for name, norm in measured.plain(self._norms).items()}
        metrics["l2_norm/grad/global"] = math.hypot(*metrics.values())
        if self._of_updates is not None:
            metrics |= self._of_updates.measured({name: each.numel() for name, each in _trained(state)})
        logger.log_metrics(metrics)

    def close(self, state: Any, logger: Any) -> None:
        if self._of_updates is not None:
            self._of_updates.close()
            self._of_updates = None


def _trained(state: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, each) for name, each in state.model.named_parameters() if each.requires_grad]


Comparison = Callable[[torch.Tensor, torch.Tensor], Any]


class _Watcher(Callback):
    """Looks at a metric whenever there is a value of it."""

    def __init__(self, monitor: str, dataloader_label: str, comp: str | Comparison | None, each_batch: bool):
        kind = type(self).__name__
        named = {"greater": torch.greater, "gt": torch.greater, "less": torch.less, "lt": torch.less}
        self.monitor = checks.text(f"{kind}: monitor", monitor)
        self.dataloader_label = checks.text(f"{kind}: dataloader_label", dataloader_label)
        if comp is None:
            comp = "less" if any(word in monitor.lower() for word in ("loss", "error", "perplexity")) else "greater"
        if not callable(comp) and (not isinstance(comp, str) or comp.lower() not in named):
            raise checks.wrong(f"{kind}: comp", comp, "'greater' or 'gt', 'less' or 'lt', or a function of two values")
        self.comp_func = named[comp.lower()] if isinstance(comp, str) else comp
        self._each_batch = each_batch

    def fit_start(self, state: Any, logger: Any) -> None:
        labels = [state.dataloader_label, *(each.label for each in state.evaluators)]
        if self.dataloader_label not in labels and get_global_rank() == 0:
            label, there = self.dataloader_label, ", ".join(map(repr, labels))
            tell(f"{type(self).__name__}: no effect, for nothing is read as {label!r}: there are {there}")

    def eval_end(self, state: Any, logger: Any) -> None:
        self._look(state, state.eval_metric_values, state.eval_metrics.get(self.dataloader_label, {}))

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._look(state, MetricsByName(state.total_loss_dict | state.train_metric_values), state.train_metrics)

    def batch_end(self, state: Any, logger: Any) -> None:
        if self._each_batch:
            self.epoch_end(state, logger)

    def _look(self, state: Any, values: dict[str, Any], metrics: dict[str, Any]) -> None:
        if state.dataloader_label != self.dataloader_label:
            return
        if self.monitor in metrics:  # another callback may have put one there
            values = {self.monitor: metrics[self.monitor].compute()}
        if self.monitor not in values:
            raise ConfigError(
                f"{type(self).__name__}: {self.dataloader_label!r} has no metric {self.monitor!r}; "
                f"it has {', '.join(values) or 'none'}"
            )
        self.see(state, torch.as_tensor(values[self.monitor]))

    def see(self, state: Any, value: torch.Tensor) -> None:
        """There is a new value."""


class EarlyStopper(_Watcher):
    """Ends the training when a metric has not become better for some time.

    Args:
        monitor: the metric's name.
        dataloader_label: of the evaluator; "train" for a metric, or a loss, of the training.
        comp: tells whether a value is better than another: "greater", "less" or a function; else as the name says.
        min_delta: by how much it has to be.
        patience: for how many epochs or batches; an int is epochs.

    Errors:
        ConfigError: another word or unit; in training, a metric that is not there.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: str | Comparison | None = None,
        min_delta: float = 0.0,
        patience: int | str | Time = 1,
    ):
        self.min_delta = abs(checks.number("EarlyStopper: min_delta", min_delta))
        self.patience = named_time("EarlyStopper: patience", patience, units=EPOCH_OR_BATCH)
        super().__init__(monitor, dataloader_label, comp, self.patience.unit is TimeUnit.BATCH)
        self.best: torch.Tensor | None = None
        self.best_occurred: Timestamp | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        return {"best": self.best.item(), "best_occurred": self.best_occurred.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.best, self.best_occurred = torch.tensor(state["best"]), Timestamp.of_state(state["best_occurred"])

    def see(self, state: Any, value: torch.Tensor) -> None:
        if self.best is None or (self.comp_func(value, self.best) and (value - self.best).abs() > self.min_delta):
            self.best, self.best_occurred = value, state.timestamp
        unit = self.patience.unit
        if state.timestamp.get(unit) - self.best_occurred.get(unit) > self.patience:
            state.stop_training()


class ThresholdStopper(_Watcher):
    """Ends the training when a metric has passed a threshold.

    Args:
        monitor, dataloader_label, comp: as EarlyStopper has them.
        threshold: the value.
        stop_on_batch: whether metrics of the training are looked at after each batch, not each epoch alone.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | Comparison | None = None,
        stop_on_batch: bool = False,
    ):
        super().__init__(monitor, dataloader_label, comp, checks.flag("ThresholdStopper: stop_on_batch", stop_on_batch))
        self.threshold = checks.number("ThresholdStopper: threshold", threshold)

    def see(self, state: Any, value: torch.Tensor) -> None:
        if self.comp_func(value, torch.as_tensor(self.threshold)):
            state.stop_training()
