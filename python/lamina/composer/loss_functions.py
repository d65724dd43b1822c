# SPDX-License-Identifier: Apache-2.0
"""Losses of scores, (N, C, ...), for classes by their numbers, (N, ...), or by their probabilities, (N, C, ...)."""

import torch
from torch.nn import functional

from lamina.errors import ConfigError
from lamina.trainer import checks


def soft_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Torch's `cross_entropy`. The mean of probabilities is over their sum, so a target without any is ignored.

    Args:
        input: scores of shape (samples, classes, ...).
        target: classes of shape (samples, ...), or probabilities of the shape of the scores.
        weight: of each class.
        size_average, reduce, ignore_index: as torch's; of classes alone.
        reduction: "mean", "sum" or "none".

    Errors:
        ConfigError: a mean of targets that are all zero.
    """
    if infer_target_type(input, target) == "indices":
        return functional.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)
    if reduction != "mean":
        return functional.cross_entropy(input, target, weight, reduction=reduction)
    probability = target.sum()
    if not probability > 0:
        raise ConfigError("soft_cross_entropy: no target has a probability above 0, so their mean is that of nothing")
    return functional.cross_entropy(input, target, weight, reduction="sum") / probability


def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "sum",
    pos_weight: torch.Tensor | None = None,
    scale_by_batch_size: bool | None = True,
) -> torch.Tensor:
    """Torch's function of that name, divided by the number of samples unless `scale_by_batch_size` is False.

    Args:
        input: scores of shape (samples, classes, ...).
        target: classes of shape (samples, ...), or probabilities of the shape of the scores.
        weight, size_average, reduce, reduction, pos_weight: as torch's.
        scale_by_batch_size: whether it is divided by the number of samples.
    """
    hot = ensure_targets_one_hot(input, target)
    loss = functional.binary_cross_entropy_with_logits(input, hot, weight, size_average, reduce, reduction, pos_weight)
    return loss / len(input) if scale_by_batch_size else loss


class DiceLoss(torch.nn.Module):
    """How little scores and targets overlap: one minus twice the overlap over the sum of both.

    Args:
        sigmoid, softmax: one of them is taken of the scores before.
        squared_pred: whether scores and targets are squared in that sum.
        jaccard: whether it is the overlap over the union.
        batch: whether sums are over the samples, too; else each sample has a loss.
        ignore_absent_classes: whether classes that no target has are left out.
        reduction: "mean", "sum" or "none".

    Errors:
        ConfigError: both `sigmoid` and `softmax`; another reduction.
    """

    def __init__(
        self,
        sigmoid: bool = False,
        softmax: bool = False,
        squared_pred: bool = False,
        jaccard: bool = False,
        batch: bool = False,
        ignore_absent_classes: bool = False,
        reduction: str = "mean",
    ):
        super().__init__()
        if sigmoid and softmax:
            raise ConfigError("DiceLoss: both sigmoid and softmax: scores go through one")
        if reduction not in ("mean", "sum", "none"):
            raise checks.wrong("DiceLoss: reduction", reduction, "'mean', 'sum' or 'none'")
        self.sigmoid, self.softmax, self.squared_pred, self.jaccard = sigmoid, softmax, squared_pred, jaccard
        self.batch, self.ignore_absent_classes, self.reduction = batch, ignore_absent_classes, reduction

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = ensure_targets_one_hot(input, target)
        is_known = target.sum(1, keepdim=True) != 0
        if self.sigmoid or (self.softmax and input.shape[1] > 1):
            input = input.sigmoid() if self.sigmoid else input.softmax(1)
        input = input * is_known
        axes = [axis for axis in range(input.dim()) if axis > 1 or (axis == 0 and self.batch)]
        overlap, has_class = (input * target).sum(axes), target.sum(axes) > 0
        power = 2 if self.squared_pred else 1
        both = (input**power).sum(axes) + (target**power).sum(axes)
        if self.jaccard:
            both = 2 * (both - overlap)
        losses = 1 - (2 * overlap + 1e-5) / (both + 1e-5)
        if self.ignore_absent_classes:
            losses = losses[..., has_class if self.batch else has_class.any(0)]
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


def infer_target_type(input: torch.Tensor, targets: torch.Tensor) -> str:
    """Says how targets give classes: "one_hot", by their probabilities, or "indices", by their numbers.

    Errors:
        ConfigError: shapes of neither.
    """
    if input.shape == targets.shape:
        return "one_hot"
    if input.dim() == targets.dim() + 1:
        return "indices"
    raise ConfigError(
        f"targets have the shape {tuple(targets.shape)}, scores {tuple(input.shape)}: targets are numbers of classes, "
        "with all axes of the scores but the second, or probabilities, with all of them"
    )


def ensure_targets_one_hot(input: torch.Tensor, targets: torch.Tensor, num_classes: int | None = None) -> torch.Tensor:
    """The probabilities of targets, in the dtype of the scores; those of a number below 0 are all 0.

    Args:
        input: scores of shape (samples, classes, ...).
        targets: classes of shape (samples, ...), or probabilities of the shape of the scores.
        num_classes: how many there are; else as the scores have.
    """
    if infer_target_type(input, targets) == "one_hot":
        return targets.to(input.dtype)
    hot = functional.one_hot(targets.clamp(min=0).long(), num_classes or input.shape[1])
    return torch.movedim(hot * (targets >= 0).unsqueeze(-1), -1, 1).to(input.dtype)
