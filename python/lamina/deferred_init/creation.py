# SPDX-License-Identifier: Apache-2.0
"""The context that scripts write around the creation of a model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensor_parallel import layers, marks
from lamina.util.settings import default_dtype


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, replace: bool = False, **tp_config: Any
) -> Iterator[None]:
    """Around the creation of a model.

    Args:
        tensor_parallelism, replace, tp_config: as the function `tensor_parallelism` has them.
        dtype: of floating-point parameters and buffers that are created inside; None for torch's default.

    Errors:
        UsageError: `dtype` is no floating-point type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"model_creation(dtype=...) takes a floating-point torch.dtype or None, not {dtype!r}")
    with (
        default_dtype(dtype or torch.get_default_dtype()),
        marks.tensor_parallelism(tensor_parallelism, replace, **tp_config),
    ):
        yield


def get_distribution_axis(tensor: torch.Tensor) -> int | None:
    """The axis along which a parameter is sliced over the ranks of TP_GROUP; None: it is whole."""
    job = current.job_if_any()
    slicing = None if job is None else layers.slicings(job.model).get(id(tensor))
    return None if slicing is None else slicing[0]
