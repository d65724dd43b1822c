# SPDX-License-Identifier: Apache-2.0
"""Precision: the numbers in which a forward and its loss are computed."""

import contextlib
import enum
from typing import Any

import torch

from lamina import _lamina
from lamina.amp import GradScaler
from lamina.composer.user_words import in_words
from lamina.job.ranks import likely_device
from lamina.trainer.ranks import copies


class Precision(str, enum.Enum):
    """Numbers of a forward, on any device. Parameters stay as they are; torch's autocast chooses what is half."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"  # with a loss scale
    AMP_BF16 = "amp_bf16"

    @classmethod
    def _missing_(cls, value: object) -> "Precision | None":
        name = _lamina.precision_named(str(value))
        return None if name is None else cls(name)

    @property
    def dtype(self) -> torch.dtype:
        """Autocast's, or float32."""
        return _DTYPES[self]


_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
}


class LossScaler(GradScaler):
    """Scales what a copy has of the loss of all copies, though gradients are a mean over these. So the halves of a
    backward are those of one device, and overflow where its do."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        return super().scale(outputs) / copies() if self._enabled else outputs

    def _unscale_grads_(self, optimizer: Any, inv_scale: torch.Tensor, *args: Any) -> dict:
        return super()._unscale_grads_(optimizer, inv_scale * copies(), *args)


def ensure_precision(given: Any, device_type: str = "cpu") -> Precision:
    """The precision of that name, in any case of its letters; `amp`, `fp16` and `bf16` are older names.

    Args:
        given: a name or a Precision; None: float32 on the CPU, float16 on accelerators.

    Errors:
        ConfigError: there is no such precision.
    """
    return given if isinstance(given, Precision) else Precision(_lamina.read_precision(in_words(given), device_type))


def get_precision_context(
    precision: str | Precision, device_type: str | None = None
) -> contextlib.AbstractContextManager:
    """A context in which a forward and its loss are computed in that precision.

    Args:
        device_type: where; else on the rank's device, and without a job on that which a job would have.

    Errors:
        ConfigError: there is no such precision.
    """
    if device_type is None:
        device_type = likely_device().type
    found = ensure_precision(precision, device_type)
    if found is Precision.FP32 and not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # to leave it off costs as much as a small layer
    return torch.autocast(device_type, found.dtype, enabled=found is not Precision.FP32)
