# SPDX-License-Identifier: Apache-2.0
"""Models as the Trainer calls them."""

import abc
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lamina.composer.loss_functions import soft_cross_entropy
from lamina.errors import ConfigError
from lamina.trainer import checks

_EXAMPLE = """
    class MyModel(lamina.trainer.ComposerModel):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, batch):
            inputs, _ = batch
            return self.module(inputs)

        def loss(self, outputs, batch):
            _, targets = batch
            return torch.nn.functional.cross_entropy(outputs, targets)"""


class ComposerModel(nn.Module, abc.ABC):
    """A model with its loss. For an evaluation by metrics it has `get_metrics` and `update_metric`, too.

    Attributes:
        logger: the Trainer's.
    """

    logger: Any = None

    def __deepcopy__(self, memo: dict) -> "ComposerModel":
        memo[id(self)] = other = self.__class__.__new__(self.__class__)
        for name, value in vars(self).items():
            vars(other)[name] = value if name == "logger" else copy.deepcopy(value, memo)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "logger"}

    @abc.abstractmethod
    def forward(self, batch: Any) -> Any:
        """The outputs for a batch of the loader."""

    @abc.abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Any:
        """The loss, as a mean over the samples of the batch: a tensor; several, to be added up; or a dictionary
        of them. Its "total" is trained, else the sum."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """The outputs that metrics are of. In training, those of `forward` are given."""
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Metrics of torchmetrics, by name; the Trainer takes copies of them."""
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Tells a metric of the outputs of `eval_forward`.

        Args:
            batch: of the loader.
            outputs: of `eval_forward`.
            metric: a copy of one that `get_metrics` gave.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has metrics, so it needs update_metric(self, batch, outputs, metric): "
            "metric.update(outputs, batch[1]), for example"
        )


class ComposerClassifier(ComposerModel):
    """A module that gives each class's score for the first part of a batch, of which the second part are the classes.

    Args:
        module: called with a batch's inputs.
        train_metrics, val_metrics: a metric of torchmetrics, or a MetricCollection; else the accuracy,
            "MulticlassAccuracy", or "Accuracy" where `num_classes` is not given, and for evaluations "CrossEntropy".
        loss_fn: of scores and classes.
        num_classes: else the module's `num_classes`, where it has one.

    Attributes:
        num_classes: of a subclass, where it has set it itself.

    Errors:
        ConfigError: an argument that is not what it is said to be.
    """

    num_classes: int | None = None

    def __init__(
        self,
        module: nn.Module,
        train_metrics: Any = None,
        val_metrics: Any = None,
        loss_fn: Callable = soft_cross_entropy,
        num_classes: int | None = None,
    ):
        super().__init__()
        if not isinstance(module, nn.Module):
            raise checks.wrong("ComposerClassifier: module", module, "a module of torch's")
        self.module = module
        if num_classes is not None:
            checks.number("ComposerClassifier: num_classes", num_classes, 1, whole=True)
        if num_classes is not None or hasattr(module, "num_classes"):
            self.num_classes = module.num_classes if num_classes is None else num_classes
        if not callable(loss_fn):
            raise checks.wrong("ComposerClassifier: loss_fn", loss_fn, "a function of outputs and targets")
        self._loss_fn = loss_fn
        if train_metrics is None or val_metrics is None:
            from lamina.composer.torch_metrics import of_classifier  # imports torchmetrics

            of_train, of_val = of_classifier(num_classes)
            train_metrics = of_train if train_metrics is None else train_metrics
            val_metrics = of_val if val_metrics is None else val_metrics
        self.train_metrics = _metrics("ComposerClassifier: train_metrics", train_metrics)
        self.val_metrics = _metrics("ComposerClassifier: val_metrics", val_metrics)

    def forward(self, batch: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return self.module(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._loss_fn(outputs, batch[1], *args, **kwargs)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        metrics = self.train_metrics if is_train else self.val_metrics
        return dict(metrics.items()) if hasattr(metrics, "items") else {type(metrics).__name__: metrics}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
        metric.update(outputs, batch[1])


def _metrics(name: str, given: Any) -> Any:
    if not hasattr(given, "items") and not hasattr(given, "compute"):
        raise checks.wrong(name, given, "a metric of torchmetrics, or a MetricCollection")
    return given


def require_model(model: Any) -> ComposerModel:
    """The model, where it has what the Trainer calls.

    Errors:
        ConfigError: a plain module, or something else.
    """
    if isinstance(model, nn.Module) and all(callable(getattr(model, name, None)) for name in ("forward", "loss")):
        return model
    raise ConfigError(
        f"the Trainer takes a ComposerModel, which has forward(batch) and loss(outputs, batch), and not a "
        f"{type(model).__name__}:\n{_EXAMPLE}"
    )
