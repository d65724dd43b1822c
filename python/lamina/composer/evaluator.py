# SPDX-License-Identifier: Apache-2.0
"""Data and metrics of evaluations, and the moments at which they happen."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lamina.composer.argument_readers import of_moments
from lamina.composer.metric_names import other_name
from lamina.composer.state import State
from lamina.errors import ConfigError
from lamina.trainer import checks
from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.events import Event
from lamina.trainer.time import EPOCH_OR_BATCH, Time, Timestamp, TimeUnit, named_time

When = Callable[[State, Event], bool]


class Evaluator:
    """A loader, and the metrics that are measured with it.

    Args:
        label: its name.
        dataloader: a loader, a DataSpec or a dictionary of its arguments.
        metric_names: which of the model's: patterns of regular expressions; else all.
        subset_num_batches: how many batches are read; -1: all. Else the Trainer's eval_subset_num_batches.
        eval_interval: how often, an int in epochs; 0: never. Else the Trainer's eval_interval.

    Errors:
        ConfigError: an argument that is not what it is said to be; an interval in another unit than epochs, batches
            and parts of the training.
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: DataSpec | Iterable | dict[str, Any],
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: int | str | Time | When | None = None,
    ):
        self.label = checks.text("Evaluator: label", label)
        is_list = isinstance(metric_names, Sequence) and not isinstance(metric_names, str)
        if metric_names is not None and not (is_list and all(map(_is_pattern, metric_names))):
            raise checks.wrong("Evaluator: metric_names", metric_names, "a list of strings, regular expressions")
        self.dataloader = ensure_data_spec(dataloader)
        self.metric_names = list(metric_names or ())
        if subset_num_batches is not None:
            checks.count_or_all("Evaluator: subset_num_batches", subset_num_batches)
        self.subset_num_batches = subset_num_batches
        self.eval_interval = None if eval_interval is None else ensure_when(eval_interval)

    def settled(self, eval_interval: When, subset_num_batches: int) -> "Evaluator":
        """Itself with these where it has none of its own: another one, for it may be given to several Trainers."""
        found = copy.copy(self)
        if self.eval_interval is None:
            found.eval_interval = eval_interval
        if self.subset_num_batches is None:
            found.subset_num_batches = subset_num_batches
        return found

    def metrics_of(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics that it measures, of these by name.

        Errors:
            ConfigError: none has such a name.
        """
        if not self.metric_names:
            return metrics
        found = {}
        for pattern in self.metric_names:
            named = {name: metric for name, metric in metrics.items() if re.match(f"(?:{pattern})$", name)}
            if (other := other_name(pattern, metrics)) is not None and not named:
                named = {pattern: metrics[other]}
            if not named:
                raise ConfigError(f"{self.label}: no metric is named {pattern!r}; there are {', '.join(metrics)}")
            found |= named
        return found


def ensure_evaluators(given: Any) -> list[Evaluator]:
    """Evaluators as they are; a loader is one with the label "eval"."""
    if isinstance(given, dict) and "dataloader" not in given:
        names = ", ".join(map(str, given))
        raise ConfigError(
            f"eval_dataloader: a dictionary is of a DataSpec's arguments, not of {names}: several loaders are "
            "[Evaluator(label=..., dataloader=...), ...]"
        )
    every = [
        each if isinstance(each, Evaluator) else Evaluator(label="eval", dataloader=each)
        for each in checks.listed(given)
    ]
    labels = [each.label for each in every]
    if double := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f"several evaluators are named {', '.join(sorted(double))}: Evaluator(label=...) names each")
    return every


def evaluate_periodically(eval_interval: int | str | Time, eval_at_fit_end: bool = True) -> When:
    """Says when to evaluate: every so many epochs or batches, or after each such part of the training, and at its
    end."""
    interval = named_time("eval_interval", eval_interval, units=(*EPOCH_OR_BATCH, TimeUnit.DURATION))
    expected = Event.EPOCH_END if interval.unit is TimeUnit.EPOCH else Event.BATCH_END

    def due(state: State, event: Event) -> bool:
        if not interval.value or event not in (expected, Event.FIT_END):
            return False
        is_passed = _passed(state, interval)
        return eval_at_fit_end and not is_passed if event is Event.FIT_END else is_passed

    return due


def ensure_when(given: int | str | Time | When) -> When:
    """A function as it is, or that of an interval."""
    if callable(given):
        return of_moments("eval_interval", given)
    return evaluate_periodically(given)


def _is_pattern(given: Any) -> bool:
    try:
        return isinstance(given, str) and bool(re.compile(given))
    except re.error:
        return False


def _passed(state: State, interval: Time) -> bool:
    """Tells whether a multiple of the interval was passed by the last batch, or with it the epoch."""
    if interval.unit is TimeUnit.EPOCH:
        return not state.timestamp.batch_in_epoch.value and state.timestamp.epoch.value % interval.value == 0
    if interval.unit is TimeUnit.BATCH:
        return state.timestamp.batch.value % interval.value == 0
    return _parts(state, state.timestamp, interval) > _parts(state, state.timestamp_before, interval)


def _parts(state: State, at: Timestamp, interval: Time) -> int:
    """How many parts of the training have passed then."""
    unit, whole = state.max_duration.unit, state.max_duration.value
    done = at.get(unit).value
    if unit is TimeUnit.EPOCH:
        if state.dataloader_len is None:
            raise ConfigError("eval_interval in dur needs a loader with a length, where max_duration is in epochs")
        done = state.epochs(at)
    return int(round(done / (whole * interval.value), 9))  # three tenths are not quite 3 times 0.1
