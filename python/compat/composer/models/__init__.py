# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import huggingface, model
from lamina.composer.huggingface import HuggingFaceModel
from lamina.composer.model import ComposerClassifier, ComposerModel

offer(__name__, base=model, tasks=model, huggingface=huggingface)
offer(f"{__name__}.tasks", classification=model)
__getattr__ = others(__name__)

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel"]
