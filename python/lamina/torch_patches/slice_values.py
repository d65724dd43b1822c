# SPDX-License-Identifier: Apache-2.0
"""Ways to the values of slices that are no operations, or none yet where they reach the dispatcher: judged like these
(lamina/value/guarded.h).

torch.compile, where it meets one of these functions, as in a mode of torch functions, knows methods by their names
alone. What it traces are no slices.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lamina import _lamina
from lamina.util.settings import replace

_WHOLES = ", where model.state_dict() has wholes"
_READS = {"numpy": "numpy", "tolist": "tolist", "__reduce_ex__": "pickled" + _WHOLES, "__dlpack__": "dlpack"}
_READ_ADDRESSES = ("_to_ndarray", "_tobytes")  # of versions of safetensors
_MAKES = ("new", "new_tensor")
_PLACES = ("__getitem__", "__setitem__")


def install(undo: ExitStack) -> None:
    """Until `undo` is closed, a slice that is read as an array, a list or a pickle is an error. So is an end of places
    along the cut that is no end of the whole."""
    for names, judged in ((_READS, _read), (("data_ptr",), _addressed), (_MAKES, _made), (_PLACES, _taken)):
        for name in names:
            replace(undo, torch.Tensor, name, judged(name, getattr(torch.Tensor, name)))


def _read(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return getattr(tensor, name)(*args, **kwargs)
        _lamina.require_whole(tensor, _READS[name])
        return original(tensor, *args, **kwargs)

    return read


def _addressed(_: str, original: Callable) -> Callable:
    """Addresses tell tied tensors apart; safetensors reads what lies there."""

    @functools.wraps(original)
    def address(tensor: torch.Tensor) -> int:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == "safetensors.torch" and caller.f_code.co_name in _READ_ADDRESSES:
            _lamina.require_whole(tensor, "saved by safetensors" + _WHOLES)
        return original(tensor)

    return address


def _made(name: str, original: Callable) -> Callable:
    """torch makes these by the first of a tensor's keys, and the guard's is no device's."""

    @functools.wraps(original)
    def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return getattr(tensor, name)(*args, **kwargs)
        is_slice = _lamina.where_cut(tensor) is not None
        return original(torch.ops.lamina.tp_own(tensor) if is_slice else tensor, *args, **kwargs)

    return made


def _taken(name: str, original: Callable) -> Callable:
    """torch leaves out a range of all places that are here, whatever end it has: in a tuple, and where it writes."""

    @functools.wraps(original)
    def read(tensor: torch.Tensor, key: Any) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return tensor.__getitem__(key)
        if type(key) is tuple and (cut := _lamina.where_cut(tensor)) is not None:
            _require_no_end(tensor, key, *cut)
        return original(tensor, key)

    @functools.wraps(original)
    def written(tensor: torch.Tensor, key: Any, value: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            tensor.__setitem__(key, value)
            return
        if (cut := _lamina.where_cut(tensor)) is not None:
            _require_no_end(tensor, key if type(key) is tuple else (key,), *cut)
        original(tensor, key, value)

    return read if name == "__getitem__" else written


def _require_no_end(tensor: torch.Tensor, key: tuple, cut: int, extent: int) -> None:
    """UsageError for a range of places along the cut that ends behind what is here, and before the whole does."""
    dims = [each for each in key if each is not None and not isinstance(each, bool)]
    dim = 0
    for each in dims:
        if each is Ellipsis:
            dim = tensor.dim() - sum(map(_dims_of, dims)) + dim
            continue
        is_range = isinstance(each, slice) and each.stop is not None and cut in (dim, -1)
        if is_range and tensor.shape[dim] <= each.stop < extent:
            _lamina.require_whole(tensor, f"places up to {each.stop}")
        dim += _dims_of(each)


def _dims_of(index: Any) -> int:
    """How many dimensions an index stands for."""
    if index is Ellipsis:
        return 0
    is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
    return index.dim() if is_mask else 1
