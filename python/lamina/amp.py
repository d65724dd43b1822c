# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision over ranks."""

from lamina.optim.grad_scaler import GradScaler as GradScaler

__all__ = ["GradScaler"]
