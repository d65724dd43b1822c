# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import torch_metrics
from lamina.composer.torch_metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    HFCrossEntropy,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
    MIoU,
    Perplexity,
)

offer(__name__, metrics=torch_metrics, nlp=torch_metrics)
__getattr__ = others(__name__)

__all__ = [
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "HFCrossEntropy",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
    "Perplexity",
]
