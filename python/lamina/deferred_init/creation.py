# SPDX-License-Identifier: Apache-2.0
"""Contexts that scripts write around the creation of a model.

`tensor_parallel_degree` is 1, so every layer has one slice: marking modules to be sliced changes nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.util.checks import require_module
from lamina.util.settings import default_dtype


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Around the creation of a model.

    Args:
        tensor_parallelism, tp_config: as the function `tensor_parallelism` has them.
        dtype: of floating-point parameters and buffers that are created inside; None for torch's default.

    Errors:
        UsageError: `dtype` is no floating-point type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"model_creation(dtype=...) takes a floating-point torch.dtype or None, not {dtype!r}")
    with default_dtype(dtype or torch.get_default_dtype()):
        yield


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> Iterator[None]:
    """Marks the modules that are created inside to have their layers sliced over the ranks of TP_GROUP.

    Args:
        enabled: whether they are marked.
        tp_config: options of sliced layers.
    """
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """As `tensor_parallelism`, for a module and those under it. UsageError: not a module."""
    require_module(module, "set_tensor_parallelism()")


def get_distribution_axis(tensor: torch.Tensor) -> int | None:
    """The axis along which a parameter is sliced over the ranks of TP_GROUP: None, it is whole."""
    return None
