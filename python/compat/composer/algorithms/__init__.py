# SPDX-License-Identifier: Apache-2.0
from lamina.trainer.gradient_clipping import GradientClipping

__all__ = ["GradientClipping"]
