# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients, as an algorithm."""

from typing import Any

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lamina.errors import ConfigError
from lamina.trainer import checks
from lamina.trainer.events import Algorithm, Event


class GradientClipping(Algorithm):
    """Clips gradients before each update, in every layout as on one device.

    Args:
        clipping_type: "norm", that of all gradients together, or "value", each element.
        clipping_threshold: the largest one.

    Errors:
        ConfigError: another type, a threshold below 0.
    """

    def __init__(self, clipping_type: str, clipping_threshold: float):
        if clipping_type == "adaptive":
            raise ConfigError("GradientClipping: clipping_type='adaptive' is not there; 'norm' and 'value' are")
        if clipping_type not in ("norm", "value"):
            raise ConfigError(f"GradientClipping: clipping_type={clipping_type!r}: it is 'norm' or 'value'")
        self.clipping_type = clipping_type
        self.clipping_threshold = float(checks.number("GradientClipping: clipping_threshold", clipping_threshold, 0))

    def match(self, event: Event, state: Any) -> bool:
        return event is Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        clip = clip_grad_norm_ if self.clipping_type == "norm" else clip_grad_value_
        clip(state.model.parameters(), self.clipping_threshold)
