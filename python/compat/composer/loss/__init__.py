# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import loss_functions
from lamina.composer.loss_functions import (
    DiceLoss,
    binary_cross_entropy_with_logits,
    soft_cross_entropy,
)

offer(__name__, loss=loss_functions, utils=loss_functions)
loss_registry = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
__getattr__ = others(__name__)

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "loss_registry", "soft_cross_entropy"]
