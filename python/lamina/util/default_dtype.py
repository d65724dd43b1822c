# SPDX-License-Identifier: Apache-2.0
"""torch's default dtype, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch's default dtype is `dtype`; afterwards the one it was."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
