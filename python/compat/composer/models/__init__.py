# SPDX-License-Identifier: Apache-2.0
from lamina.trainer import ComposerClassifier, ComposerModel, HuggingFaceModel

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel"]
