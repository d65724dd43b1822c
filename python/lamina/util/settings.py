# SPDX-License-Identifier: Apache-2.0
"""Settings that are another one for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

_MISSING = object()


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


def replace(undo: ExitStack, owner: Any, name: str, value: Any, stays: bool = False) -> None:
    """Puts `value` into an attribute of a module or a class until `undo` is closed.

    Args:
        stays: where somebody has put something around it meanwhile, all that is left there: by then it does nothing.
    """
    had = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)

    def put_back() -> None:
        if stays and vars(owner).get(name) is not value:
            return
        if had is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, had)

    undo.callback(put_back)
