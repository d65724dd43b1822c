# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.trainer import ComposerClassifier, ComposerModel, HuggingFaceModel, huggingface, model

offer(__name__, base=model, tasks=model, huggingface=huggingface)
offer(f"{__name__}.tasks", classification=model)
__getattr__ = others(__name__)

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel"]
