# SPDX-License-Identifier: Apache-2.0
"""Optimizers under apex's names and with its arguments; on the CPU, fused all the same."""

from lamina.optim import functional
from lamina.optim.functional import FusedAdam

FusedLAMB = FusedLamb = functional.LAMB
FusedNovoGrad = functional.NovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
