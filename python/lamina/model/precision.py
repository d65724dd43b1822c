# SPDX-License-Identifier: Apache-2.0
"""Models in half precision, as the configuration says."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from lamina import _lamina
from lamina.deferred_init.delayed import convert

_OF_NAME = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "own": None}


def half_of(config: _lamina.Config) -> torch.dtype | None:
    """The dtype of a model's floating-point parameters; None where they stay as they are."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 or config.fp16_params else None


def convert_model(module: nn.Module, config: _lamina.Config) -> None:
    """Gives parameters and buffers of floating-point numbers their dtypes, in place. Each stays the same object."""

    def give(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None) -> None:
        for tensor in tensors:
            if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                convert(tensor, dtype)

    half = half_of(config)
    with torch.no_grad():
        give(module.parameters(), half)
        give(module.buffers(), half if config.buffer_dtype is None else _OF_NAME[config.buffer_dtype])


def convert_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Arguments of a call whose tensors of floating-point numbers, in trees of any kind, have that dtype."""

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return _pytree.tree_map(converted, inputs)
