# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer
from lamina.trainer import ComposerClassifier, ComposerModel, HuggingFaceModel, huggingface, model

offer(__name__, base=model, tasks=model, huggingface=huggingface)

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel"]
