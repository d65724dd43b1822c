# SPDX-License-Identifier: Apache-2.0
"""Settings that are another one for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def setting(value: Any, get: Callable[[], Any], put: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `value` is put there; afterwards again what `get` gave before."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Inside, torch's default dtype is `dtype`."""
    return setting(dtype, torch.get_default_dtype, torch.set_default_dtype)
