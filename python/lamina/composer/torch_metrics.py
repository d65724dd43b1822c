# SPDX-License-Identifier: Apache-2.0
"""Metrics for models of language, for classes and for segmentations. Each sample or token counts as much as any other,
however batches are cut. Importing this imports torchmetrics, which takes seconds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lamina.composer.loss_functions import infer_target_type, soft_cross_entropy


class _Mean(Metric):
    """A mean: a sum, and of how many."""

    full_state_update = False

    def __init__(self, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        for name in ("total", "count"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), "sum")

    def _add(self, total: Any, count: Any) -> None:
        self.total += total
        self.count += count

    def compute(self) -> torch.Tensor:
        return (self.total / self.count).float()


class CrossEntropy(_Mean):
    """The cross entropy of scores, (N, C, ...), for targets as `soft_cross_entropy` takes them.

    Args:
        ignore_index: the class of targets that do not count.
    """

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, preds: torch.Tensor, targets: torch.Tensor) -> None:
        loss = soft_cross_entropy(_scores(preds), targets, ignore_index=self.ignore_index, reduction="sum")
        is_soft = infer_target_type(preds, targets) == "one_hot"
        self._add(loss, targets.sum() if is_soft else (targets != self.ignore_index).sum())


class LossMetric(_Mean):
    """The mean of a loss over samples.

    Args:
        loss_function: of predictions and targets, with a mean over them.
    """

    def __init__(self, loss_function: Callable, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step)
        self.loss_function = loss_function

    def update(self, preds: Any, targets: torch.Tensor) -> None:
        self._add(self.loss_function(preds, targets) * len(targets), len(targets))


class LanguageCrossEntropy(CrossEntropy):
    """The cross entropy of logits, (..., words), or of outputs that have them, for a word at each position.

    Args:
        vocab_size: how many words there are; else as many as the last axis has.
        dist_sync_on_step: torchmetrics': whether each `forward` adds up what all processes have.
        ignore_index: the target of positions that do not count.
    """

    def __init__(self, vocab_size: int | None = None, dist_sync_on_step: bool = False, ignore_index: int = -100):
        super().__init__(ignore_index, dist_sync_on_step)
        self.vocab_size = vocab_size

    def update(self, output: Mapping | torch.Tensor, target: torch.Tensor) -> None:
        logits = _scores(output)
        super().update(logits.reshape(-1, self.vocab_size or logits.shape[-1]), target.reshape(-1))


class LanguagePerplexity(LanguageCrossEntropy):
    """The exponential of `LanguageCrossEntropy`."""

    def compute(self) -> torch.Tensor:
        return super().compute().exp()


class HFCrossEntropy(LanguageCrossEntropy):
    """The loss that outputs of transformers have, a mean over targets; else the cross entropy of their logits."""

    def __init__(self, dist_sync_on_step: bool = False):
        super().__init__(None, dist_sync_on_step)

    def update(self, output: Mapping | torch.Tensor, target: torch.Tensor) -> None:
        if not isinstance(output, Mapping) or output.get("loss") is None:
            return super().update(output, target)
        count = (target != self.ignore_index).sum()
        return self._add(output["loss"] * count, count)


class Perplexity(HFCrossEntropy):
    """The exponential of `HFCrossEntropy`."""

    def compute(self) -> torch.Tensor:
        return super().compute().exp()


class MaskedAccuracy(_Mean):
    """The part of positions at which the largest of the scores, (..., classes), is the target's.

    Args:
        ignore_index: the target of positions that do not count.
    """

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, preds: Mapping | torch.Tensor, target: torch.Tensor) -> None:
        counts = target != self.ignore_index
        self._add((_scores(preds).argmax(-1) == target)[counts].sum(), counts.sum())


class BinaryF1Score(Metric):
    """The F1 score of scores, (N, 2), for the classes 0 and 1."""

    full_state_update = False

    def __init__(self, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        for name in ("true_positive", "false_positive", "false_negative"):
            self.add_state(name, torch.tensor(0), "sum")

    def update(self, output: Mapping | torch.Tensor, target: torch.Tensor) -> None:
        found = _scores(output).argmax(1)
        self.true_positive += ((found == 1) & (target == 1)).sum()
        self.false_positive += ((found == 1) & (target == 0)).sum()
        self.false_negative += ((found == 0) & (target == 1)).sum()

    def compute(self) -> torch.Tensor:
        return self.true_positive / (self.true_positive + 0.5 * (self.false_positive + self.false_negative))


class MIoU(Metric):
    """The overlap of predicted and true pixels of a class over their union, in percent: the mean over classes that are
    in either.

    Args:
        num_classes: of the scores, (N, C, ...), and of the targets, (N, ...).
        ignore_index: the target of pixels that do not count.
    """

    full_state_update = False

    def __init__(self, num_classes: int, ignore_index: int = -1):
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.add_state("total_intersect", torch.zeros(num_classes, dtype=torch.float64), "sum")
        self.add_state("total_union", torch.zeros(num_classes, dtype=torch.float64), "sum")

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        counts = targets != self.ignore_index
        found, targets = logits.argmax(1)[counts], targets[counts]
        overlap = self._pixels(found[found == targets])
        self.total_intersect += overlap
        self.total_union += self._pixels(found) + self._pixels(targets) - overlap

    def compute(self) -> torch.Tensor:
        seen = self.total_union != 0
        return 100 * (self.total_intersect[seen] / self.total_union[seen]).mean()

    def _pixels(self, classes: torch.Tensor) -> torch.Tensor:
        """How many there are of each class."""
        return classes[(classes >= 0) & (classes < self.num_classes)].bincount(minlength=self.num_classes)


class Dice(_Mean):
    """Twice the overlap of predicted and true pixels over their sum, in percent: the mean over classes but the first,
    and over samples. A class that is in neither counts as a full overlap.

    Args:
        num_classes: of the scores, (N, C, ...).
    """

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes

    def update(self, preds: torch.Tensor, targets: torch.Tensor) -> None:
        found, targets = preds.argmax(1).flatten(1), targets.flatten(1)
        for number in range(1, self.num_classes):
            is_found, is_true = found == number, targets == number
            both, overlap = is_found.sum(1) + is_true.sum(1), (is_found & is_true).sum(1)
            self._add(torch.where(both > 0, 2 * overlap / both, 1.0).sum(), len(both))

    def compute(self) -> torch.Tensor:
        return 100 * super().compute()


def of_classifier(num_classes: int | None) -> tuple[MetricCollection, MetricCollection]:
    """The metrics of a classifier that is given none, in training and in evaluations. The accuracy goes by the name of
    its class where the number of classes is given."""
    name = "Accuracy" if num_classes is None else "MulticlassAccuracy"
    train, val = (MulticlassAccuracy(num_classes, average="micro") for _ in range(2))
    return MetricCollection({name: train}), MetricCollection({name: val, "CrossEntropy": CrossEntropy()})


def _scores(output: Mapping | torch.Tensor) -> torch.Tensor:
    """The scores in outputs, in which sums are right: not in half."""
    scores = output["logits"] if isinstance(output, Mapping) else output
    return scores.float() if scores.dtype.itemsize < 4 else scores
