# SPDX-License-Identifier: Apache-2.0
"""When others may do something in a training: events, and the callbacks and algorithms that hear of them."""

import abc
import enum
from typing import Any


class Event(str, enum.Enum):
    """A moment of a training, in the order of the names. Those between BEFORE_FORWARD and AFTER_BACKWARD are of a
    microbatch, and happen inside of a step, on the ranks that lead. LAYOUT_CHANGE follows a `lamina.change()`, between
    two batches."""

    INIT = "init"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"
    LAYOUT_CHANGE = "layout_change"

    @property
    def is_before_event(self) -> bool:
        """Tells whether another event ends what this one begins."""
        return self.name.endswith("_START") or "BEFORE_" in self.name

    @property
    def is_after_event(self) -> bool:
        """Tells whether this one ends what another event began."""
        return self.name.endswith("_END") or "AFTER_" in self.name

    @property
    def canonical_name(self) -> str:
        """The name without its start, end, before or after."""
        words = self.value.replace("before_", "").replace("after_", "")
        return words.removesuffix("_start").removesuffix("_end")

    @property
    def is_predict(self) -> bool:
        """Tells whether it is of a prediction."""
        return self.name.startswith("PREDICT_")

    @property
    def is_eval(self) -> bool:
        """Tells whether it is of an evaluation."""
        return self.name.startswith("EVAL_")

    @classmethod
    def _missing_(cls, value: object) -> "Event | None":
        return next((event for event in cls if event.value == str(value).lower()), None)

    def __str__(self) -> str:
        return self.value


class _Stateful:
    """Has, perhaps, something that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all of it that a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""


class Callback(_Stateful):
    """Hears of events: each is a method of its name, `def batch_end(self, state, logger)`, that does nothing here."""

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        """Calls the event's method; may be overridden in place of them."""
        getattr(self, event.value)(state, logger)

    def close(self, state: Any, logger: Any) -> None:
        """The Trainer ends, well or not."""

    def post_close(self) -> None:
        """All callbacks have been closed."""


def _nothing(self: Callback, state: Any, logger: Any) -> None:
    pass


for _event in Event:
    setattr(Callback, _event.value, _nothing)


class Algorithm(_Stateful, abc.ABC):
    """Changes a training, before callbacks hear of an event."""

    @abc.abstractmethod
    def match(self, event: Event, state: Any) -> bool:
        """Tells whether `apply` is to be called."""

    @abc.abstractmethod
    def apply(self, event: Event, state: Any, logger: Any) -> int | None:
        """Changes something, of the state for example."""
