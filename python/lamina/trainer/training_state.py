# SPDX-License-Identifier: Apache-2.0
"""How a training is."""

import contextvars
from typing import Any

import torch

from lamina.trainer import measured
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.time import Time, Timestamp, ensure_time


class _OfMicrobatch:
    """An attribute that is a microbatch's inside of the body that runs it, for those of several overlap."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._variable = contextvars.ContextVar(name, default=None)

    def __get__(self, state: Any, owner: type | None = None) -> Any:
        return self._variable.get()

    def __set__(self, state: Any, value: Any) -> None:
        self._variable.set(value)


_MEASURED = "total_loss_dict", "train_metric_values", "eval_metric_values"


class TrainingState:
    """A training as the loop runs it, and as callbacks and algorithms see and change it.

    Args:
        model: that is trained.
        run_name: of the training.
        seed: of all random numbers; rank 0 draws one if it is None.

    Attributes:
        model: the model; its names are those of the user's.
        batch, outputs, loss: the current ones, in a step those of the microbatch.
        timestamp: how far the training is.
        eval_timestamp, predict_timestamp: how far the evaluation, or the prediction, is.
        max_duration: how far it goes.
        device_train_microbatch_size, grad_accum: how a batch is cut, the one or the other.
        auto_microbatching: whether microbatches become smaller where memory is lacking.
        train_dataloader: what is trained with.
        counts_tokens: whether a function counts the tokens of that.
        dataloader, dataloader_label, dataloader_len: what is being read, and its number of batches.
        train_metrics, eval_metrics: metrics, the latter by the evaluator's label.
        evaluators: what is evaluated in the training, see EvaluationData.
        train_metric_values, eval_metric_values: their values as plain numbers, in training `measured.unread`.
        total_loss_dict: the losses of the last batch of all ranks, numbers as in `train_metric_values`.
        fits: how many calls of `fit` have ended.
        fit_began: where the latest one began.
        dealt_anew: batches of the epoch, and their part of it, before it was dealt anew.
        unfinished: an event and the number of the evaluator with which the training goes on, where it ended amid that.
    """

    batch, outputs, loss = _OfMicrobatch(), _OfMicrobatch(), _OfMicrobatch()

    def __init__(self, model: Any, run_name: str, seed: int | None):
        self.model = model
        self.run_name = run_name
        self.seed = seed  # drawn by rank 0, if None
        self.scaler: Any = None
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.algorithms: list[Any] = []
        self.callbacks: list[Any] = []
        self.evaluators: list[Any] = []
        self.timestamp = self.timestamp_before = Timestamp()  # now, and a batch ago
        self.eval_timestamp = self.predict_timestamp = Timestamp()
        self.dataloader: Any = None
        self.train_dataloader: Any = None
        self.counts_tokens = True
        self.dataloader_label: str | None = None
        self.dataloader_len: int | None = None
        self.device_train_microbatch_size: int | None = None
        self.grad_accum: int | None = None
        self.auto_microbatching = False
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self.total_loss_dict: dict[str, float | torch.Tensor] = {}
        self.unfinished: tuple[str, int] | None = None
        self.fits = 0
        self.fit_began: Timestamp | None = None
        self._max_duration: Time | None = None
        self._is_stopped = False
        self.dealt_anew = (0, 0.0)
        self._part = 0.0  # of an epoch, that a checkpoint has
        self._stopped_before: str | None = None  # the max_duration of a training that a checkpoint has, and was stopped

    @property
    def max_duration(self) -> Time | None:
        """How far the training goes; an int is epochs, a string is `Time.from_timestring`'s."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: Any) -> None:
        self._max_duration, self._is_stopped = None if value is None else ensure_time(value), False

    @property
    def is_done(self) -> bool:
        """Tells whether the training has reached its end."""
        return self._is_stopped or self.timestamp >= self._max_duration

    def stop_training(self) -> None:
        """Ends the training with this batch, until there is another max_duration; on every rank alike."""
        self._is_stopped = True

    def progress(self) -> dict[str, Any]:
        """How far the training is, and what it has measured, as plain containers."""
        return {
            "timestamp": self.timestamp.state_dict(),
            "timestamp_before": self.timestamp_before.state_dict(),
            "seed": self.seed,
            "stopped_before": str(self.max_duration) if self._is_stopped else None,
            "microbatch_size": self.device_train_microbatch_size if self.auto_microbatching else None,
            "scaler": self.scaler.state_dict(),
            "run_name": self.run_name,
            "unfinished": self.unfinished,
            "epoch_part": None
            if self.dataloader_len is None
            else self.epochs(self.timestamp) - self.timestamp.epoch.value,
            "fits": self.fits,
            "fit_began": None if self.fit_began is None else self.fit_began.state_dict(),
            **{name: measured.plain(dict(getattr(self, name))) for name in _MEASURED},
        }

    def go_on(self, progress: dict[str, Any]) -> None:
        """Goes on from there. Where the training was stopped, it is unless its max_duration is another."""
        self.timestamp = Timestamp.of_state(progress["timestamp"])
        self.timestamp_before = Timestamp.of_state(progress["timestamp_before"])
        self.seed = progress["seed"]
        self.unfinished = progress.get("unfinished")
        self.fits, began = progress.get("fits", 0), progress.get("fit_began")
        self.fit_began = None if began is None else Timestamp.of_state(began)
        self._stopped_before, self._part = progress["stopped_before"], progress.get("epoch_part") or 0.0
        self.go_on_until(None)
        if self.auto_microbatching:
            self.device_train_microbatch_size = progress["microbatch_size"]
        if progress["scaler"]:
            self.scaler.load_state_dict(progress["scaler"])
        for name in _MEASURED:
            getattr(self, name).update(progress[name])

    def go_on_until(self, until: Time | None) -> None:
        """Goes on with what a checkpoint has, until then if it is not None. Where that was stopped before, it is."""
        if until is not None:
            self.max_duration = until
        self._is_stopped = self._stopped_before == str(self.max_duration)

    def go_on_amid_epoch(self, is_dealt_anew: bool) -> None:
        """The epoch goes on; perhaps with other batches than before."""
        self.dealt_anew = (self.timestamp.batch_in_epoch.value, self._part) if is_dealt_anew else (0, 0.0)

    def epochs(self, at: Timestamp) -> float:
        """How many epochs have passed then: the current one's part by its batches."""
        before, part = self.dealt_anew
        batches, of_all = at.batch_in_epoch.value - before, self.dataloader_len - before
        return at.epoch.value + part + (1 - part) * min(max(batches / max(of_all, 1), 0), 1)

    def batches(self) -> float:
        """How many batches such as those of now have passed: epochs that had others count as epochs."""
        now, length = self.timestamp, int(self.dataloader_len)
        if not self.dealt_anew[0] and now.batch == now.epoch.value * length + now.batch_in_epoch.value:
            return now.batch.value
        return self.epochs(now) * length

    def get_elapsed_duration(self) -> Time | None:
        """Which part of the training is done, from 0 to 1."""
        if self._max_duration is None:
            return None
        return self.timestamp.get(self._max_duration.unit) / self._max_duration

    def set_dataloader(self, spec: DataSpec | None, label: str | None, length: int | None) -> None:
        """Another loader is being read.

        Args:
            spec: the loader; None: none is read.
            label: its name.
            length: how many batches it has, where that is known.
        """
        self.dataloader = None if spec is None else spec.dataloader
        self.dataloader_label, self.dataloader_len = label, length
