# SPDX-License-Identifier: Apache-2.0
"""Precision: the numbers in which a forward and its loss are computed."""

import contextlib
import enum
from typing import Any

import torch

from lamina.amp import GradScaler
from lamina.errors import ConfigError
from lamina.trainer.ranks import copies
from lamina.util.checks import nearest


class Precision(str, enum.Enum):
    """Numbers of a forward, on any device. Parameters stay as they are; torch's autocast chooses what is half."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"  # with a loss scale
    AMP_BF16 = "amp_bf16"

    @classmethod
    def _missing_(cls, value: object) -> "Precision | None":
        return ({each.value: each for each in cls} | _OLD).get(str(value).lower())

    @property
    def dtype(self) -> torch.dtype:
        """Autocast's, or float32."""
        return _DTYPES[self]


_OLD = {"amp": Precision.AMP_FP16, "fp16": Precision.AMP_FP16, "bf16": Precision.AMP_BF16}
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
    if given is None:
        return Precision.FP32 if device_type == "cpu" else Precision.AMP_FP16
    try:
        return Precision(given)
    except ValueError:
        pass
    names = [each.value for each in Precision]
    raise ConfigError(f"precision={given!r}: it is one of {', '.join(names)}; the nearest is {nearest(given, names)}")


def get_precision_context(
    precision: str | Precision, device_type: str | None = None
) -> contextlib.AbstractContextManager:
    """A context in which a forward and its loss are computed in that precision.

    Args:
        device_type: where; else the accelerator, or the CPU where there is none.

    Errors:
        ConfigError: there is no such precision.
    """
    if device_type is None:
        device_type = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    found = ensure_precision(precision, device_type)
    if found is Precision.FP32 and not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # to leave it off costs as much as a small layer
    return torch.autocast(device_type, found.dtype, enabled=found is not Precision.FP32)
