# SPDX-License-Identifier: Apache-2.0
"""Models in half precision, as the configuration says."""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from lamina import _lamina
from lamina.deferred_init.delayed import convert


def half_of(config: _lamina.Config) -> torch.dtype | None:
    """The dtype of a model's floating-point parameters and buffers; None where they stay as they are."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 or config.fp16_params else None


def convert_model(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters and buffers of floating-point numbers that dtype, in place. Each stays the same object."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                convert(tensor, dtype)


def convert_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Arguments of a call whose tensors of floating-point numbers, in trees of any kind, have that dtype."""

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return _pytree.tree_map(converted, inputs)
