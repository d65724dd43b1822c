# SPDX-License-Identifier: Apache-2.0
"""Settings of a training, and the arguments that they depend on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lamina.composer.precision import Precision

HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # keys of `init`
# As torch's GradScaler begins.
_LOSS_SCALE = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 65536.0, "scale_window": 2000}}


@dataclasses.dataclass(frozen=True)
class Given:
    """Arguments of a Trainer beside its configurations.

    Attributes:
        ranks: of the job.
        device_type: "cpu", or an accelerator's.
        batch_size: of a rank's loader, where it says that.
    """

    ranks: int = 1
    device_type: str = "cpu"
    batch_size: int | None = None
    device_train_microbatch_size: int | str | None = None
    grad_accum: int | None = 1


@dataclasses.dataclass
class Settings:
    """Settings of a training, as a configuration asks for them.

    Attributes:
        keys: of `lamina.init`.
        layout: its name for readers, a sharding strategy or a stage of DeepSpeed's; None: lamina_config alone says it.
        precision: that of the Trainer.
        autocast: that of forwards and losses; under `deepspeed_config` the model alone is half.
        loss_scale: arguments of DistributedOptimizer for models that are half.
        clipping_norm: what the norm of all gradients is clipped to; None: nothing.
        activation_checkpointing: whether the modules that the model chooses are checkpointed.
        min_params: see `units`; None: all modules that are called are units.
        verbose: whether the table of units is printed.
        ignored: modules that stay whole on every rank, with all that is in them.
        unheeded: keys that were given, and that change no result.
    """

    precision: Precision
    autocast: Precision
    layout: str | None = None
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_LOSS_SCALE))
    clipping_norm: float | None = None
    activation_checkpointing: bool = False
    min_params: float | None = None
    verbose: bool = False
    ignored: Sequence[nn.Module] = ()
    unheeded: Sequence[str] = ()

    @property
    def grad_scaler(self) -> bool:
        """Tells whether losses are scaled by `lamina.amp.GradScaler`."""
        return self.precision is Precision.AMP_FP16 and not self._is_half

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Arguments of `lamina.DistributedOptimizer`: its loss scale, where the model is half."""
        return self.loss_scale if self.precision is Precision.AMP_FP16 and self._is_half else {}

    @property
    def _is_half(self) -> bool:
        return any(self.keys.get(key) is True for key in HALF.values())


def keys_of_dtypes(param: torch.dtype | None, reduce: torch.dtype | None, buffer: torch.dtype | None) -> dict[str, Any]:
    """The keys of `init` for the dtypes of parameters, of gradients that travel and of buffers; None: those they have.
    A model of float32, whose gradients and buffers are to be that, too, stays as it is.

    Args:
        param: of parameters in a forward.
        reduce: of gradients that travel.
        buffer: of buffers.
    """
    full = {torch.float32: "fp32"}
    is_half = param in HALF
    of_buffers = ({None: "own"} | full | HALF) if is_half else HALF
    return {
        **{key: dtype == param for dtype, key in HALF.items()},
        "reduce_dtype": (full | HALF if is_half else HALF).get(reduce),
        "buffer_dtype": None if buffer == param else of_buffers.get(buffer),
    }
