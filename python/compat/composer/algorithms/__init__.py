# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import gradient_clipping
from lamina.composer.gradient_clipping import GradientClipping

offer(__name__, gradient_clipping=gradient_clipping)
offer(f"{__name__}.gradient_clipping", gradient_clipping=gradient_clipping)
__getattr__ = others(__name__)

__all__ = ["GradientClipping"]
