# SPDX-License-Identifier: Apache-2.0
"""Metrics and losses beside plain computations, over batches of unequal sizes and over copies of the model."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

import composer.loss
import composer.metrics as named
from lamina.errors import ConfigError
from lamina.trainer import Callback, ComposerClassifier, Trainer, loss_functions, metrics
from lamina.trainer.monitors import ThresholdStopper

HALVES = (0, 1), (1, 4), (4, 9)  # of batches


def of_copies(metric, *data):
    """The value over three copies, of which each is told of its part of the data in two updates."""
    parts = []
    for first, end in HALVES:
        part = copy.deepcopy(metric)
        for at in {first, (first + end) // 2}:
            until = end if at == (first + end) // 2 else (first + end) // 2
            if until > at:
                part.update(*(each[at:until] for each in data))
        parts.append(metrics._states(part))
    metrics._join(metric, parts)
    metric._update_count = 1
    return metric.compute()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def words(batch=9, length=5, count=7):
    logits, labels = torch.randn(batch, length, count), torch.randint(count, (batch, length))
    labels[torch.rand(batch, length) < 0.4] = -100
    return logits, labels


def test_metrics_of_words_count_each_word_once():
    logits, labels = words()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for metric in (named.LanguageCrossEntropy(7), named.LanguageCrossEntropy(), named.HFCrossEntropy()):
        torch.testing.assert_close(of_copies(metric, logits, labels), loss)
    for metric in (named.LanguagePerplexity(7), named.Perplexity()):
        torch.testing.assert_close(of_copies(metric, logits, labels), loss.exp())
    right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
    torch.testing.assert_close(of_copies(named.MaskedAccuracy(), logits, labels), right)


def test_outputs_of_transformers_have_their_loss_weighed_by_its_words():
    logits, labels = words()
    metric = named.HFCrossEntropy()
    for at in range(9):
        loss = functional.cross_entropy(logits[at], labels[at]) if (labels[at] >= 0).any() else torch.tensor(0.0)
        metric.update({"loss": loss, "logits": None}, labels[at])
    torch.testing.assert_close(metric.compute(), functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_a_sum_of_scores_in_half_is_that_of_their_values():
    logits, labels = torch.randn(4096, 7).bfloat16(), torch.randint(7, (4096,))
    for metric in (named.CrossEntropy(), named.LanguageCrossEntropy()):
        metric.update(logits, labels)
        torch.testing.assert_close(metric.compute(), functional.cross_entropy(logits.float(), labels))


def test_cross_entropy_takes_numbers_and_probabilities_of_pixels():
    scores, classes = torch.randn(9, 3, 4, 4), torch.randint(3, (9, 4, 4))
    classes[torch.rand(9, 4, 4) < 0.3] = -1
    loss = functional.cross_entropy(scores, classes, ignore_index=-1)
    torch.testing.assert_close(of_copies(named.CrossEntropy(ignore_index=-1), scores, classes), loss)
    hot = loss_functions.ensure_targets_one_hot(scores, classes)
    assert hot.sum(1).tolist() == (classes >= 0).float().tolist()
    torch.testing.assert_close(of_copies(named.CrossEntropy(), scores, hot), loss)
    torch.testing.assert_close(composer.loss.soft_cross_entropy(scores, hot), loss)
    samples = of_copies(named.LossMetric(functional.mse_loss), scores, hot)
    torch.testing.assert_close(samples, functional.mse_loss(scores, hot))


def test_f1_and_overlaps_are_those_of_all_samples():
    scores, classes = torch.randn(9, 2), torch.randint(2, (9,))
    expected = BinaryF1Score()(scores.argmax(1), classes)
    torch.testing.assert_close(of_copies(named.BinaryF1Score(), scores, classes), expected)
    scores, classes = torch.randn(9, 4, 5, 5), torch.randint(3, (9, 5, 5))
    classes[0] = -1
    found, keep = scores.argmax(1), classes != -1
    unions = [((found == c) | (classes == c))[keep].sum() for c in range(4)]
    overlaps = [((found == c) & (classes == c))[keep].sum() for c in range(4)]
    expected = sum(100 * overlap / union for overlap, union in zip(overlaps, unions, strict=True)) / 4
    assert of_copies(named.MIoU(4), scores, classes).item() == pytest.approx(expected.item())
    dice = []
    for each, true in zip(found, classes, strict=True):
        for c in (1, 2, 3):
            both = (each == c).sum() + (true == c).sum()
            dice.append(2 * ((each == c) & (true == c)).sum() / both if both else 1.0)
    assert of_copies(named.Dice(4), scores, classes).item() == pytest.approx(100 * float(sum(dice)) / len(dice))


def test_a_dice_loss_is_small_where_scores_are_right():
    classes = torch.randint(3, (4, 6, 6))
    hot = loss_functions.ensure_targets_one_hot(torch.zeros(4, 3, 6, 6), classes)
    for options in ({}, {"jaccard": True}, {"batch": True}, {"squared_pred": True}):
        assert composer.loss.DiceLoss(**options)(hot, classes).item() == pytest.approx(0, abs=1e-5)
    wrong = composer.loss.DiceLoss(reduction="none")(1 - hot, classes)
    assert wrong.shape == (4, 3) and (wrong > 0.99).all()
    assert composer.loss.DiceLoss(ignore_absent_classes=True, reduction="none")(hot, classes.clamp(max=1)).shape == (
        4,
        2,
    )
    assert composer.loss.DiceLoss(softmax=True)(20 * hot, classes) < 1e-4


def test_losses_of_probabilities_are_divided_by_them():
    scores, probability = torch.randn(6, 3), torch.rand(6, 3)
    rows = -(probability * scores.log_softmax(1)).sum(1)
    loss = composer.loss.soft_cross_entropy
    torch.testing.assert_close(loss(scores, probability), rows.sum() / probability.sum())
    torch.testing.assert_close(loss(scores, probability, reduction="none"), rows)
    binary = composer.loss.binary_cross_entropy_with_logits(scores, probability)
    torch.testing.assert_close(
        binary, functional.binary_cross_entropy_with_logits(scores, probability, reduction="sum") / 6
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: composer.loss.soft_cross_entropy(torch.ones(2, 3), torch.zeros(2, 3)), "no target has a probability"),
        (lambda: composer.loss.soft_cross_entropy(torch.ones(2, 3), torch.zeros(3)[0]), "targets have the shape"),
        (lambda: composer.loss.DiceLoss(sigmoid=True, softmax=True), "scores go through one"),
        (lambda: composer.loss.DiceLoss(reduction="most"), "reduction='most'"),
    ],
)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


class Puts(Callback):
    def epoch_end(self, state, logger):
        state.train_metrics["accuracy"] = metric = MulticlassAccuracy(2, average="micro")
        metric.update(torch.arange(10) < (2, 6, 9)[state.timestamp.epoch.value - 1], torch.ones(10))


class Kept(Metric):
    """Keeps what it sees in one tensor, not in a list."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")

    def update(self, values):
        self.seen = torch.cat([self.seen, values])

    def compute(self):
        return self.seen


@pytest.mark.parametrize("others", [1.0, 2.0])  # with as many values, and with another number
def test_tensors_that_copies_join_have_all_values_of_each(monkeypatch, others):
    seen = torch.ones(2), torch.arange(2 * others)
    joined = metrics.fresh({"kept": Kept()})
    joined["kept"].update(seen[0])
    of_copies = [{"kept": (1, {"seen": each})} for each in seen]
    monkeypatch.setattr(metrics, "of_each_copy", lambda own: of_copies)
    assert metrics.computed(joined)["kept"] == torch.cat(seen).tolist()


def test_a_collection_among_metrics_is_named():
    with pytest.raises(ConfigError, match=r"a MetricCollection as 'both'.*the collection itself"):
        metrics.fresh({"both": MetricCollection([MulticlassAccuracy(3)])})


def test_a_stopper_sees_a_metric_that_another_callback_put_there():
    data = TensorDataset(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    model = ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2)
    stopper = ThresholdStopper("accuracy", "train", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"optimizers": optimizer, "callbacks": [Puts(), stopper], "max_duration": "9ep"}
    trainer = Trainer(model=model, train_dataloader=DataLoader(data, 4), **options)
    trainer.fit()
    assert trainer.state.timestamp.epoch == 2
    trainer.close()
