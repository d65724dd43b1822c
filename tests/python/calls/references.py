# SPDX-License-Identifier: Apache-2.0
"""References for tests, and what it means that a reference and a plain tensor gave the same."""

import numpy as np
import torch
from python.built import extension

# pending_reference(like, take, gradient=False): a reference that looks like `like` and becomes what `take` returns when
# something reads it. `take` is called when the value is needed, until it returns; the reader may hold the GIL or not,
# and sees what it raises. The strides of a gradient's reference are those of the value.
pending_reference = extension("pending_references").pending_reference


def pending(value, gradient=False):
    """A reference that becomes a copy of `value`."""
    return pending_reference(value, lambda: value.detach().clone(memory_format=torch.preserve_format), gradient)


def plain(value):
    return value.detach().clone(memory_format=torch.preserve_format)


def same(a, b):
    """True for equal results: tensors by what they look like and hold, containers by their items."""
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b)
            and (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad)
            and a.stride() == b.stride()
            and torch.equal(a, b)
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and a == b
