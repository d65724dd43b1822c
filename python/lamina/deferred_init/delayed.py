# SPDX-License-Identifier: Apache-2.0
"""Parameters that get their values when it is known who owns them."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lamina import _lamina
from lamina.deferred_init.tape import Recorder, View

_WHY = (
    "this parameter was created inside delay_param_initialization() and gets its value when its DistributedModel is "
    "partitioned: until then only its shape, dtype and device can be read"
)
_delayed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> (recorder, view)
_active = False


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Around the creation of a model: its large parameters take no memory until the model is partitioned, and then only
    on the ranks that own them. Their values are those that they would have had at once.

    They must not be read or written between the context and the partition; a state that the DistributedModel loads in
    between is loaded when it is partitioned. Small parameters, buffers, and tensors that share memory with others have
    their values when the context ends. A context inside another one belongs to it.

    Args:
        enabled: whether to delay anything.
    """
    global _active
    if not enabled or _active:
        yield
        return
    recorder = Recorder()
    _active = True
    try:
        with recorder:
            yield
    finally:
        _active = False
        _settle(recorder)


def is_delayed(tensor: torch.Tensor) -> bool:
    """True where a parameter waits for its value."""
    return tensor in _delayed


def initialise(tensors: Iterable[torch.Tensor]) -> None:
    """Gives those of the tensors that wait for their values what they wait for."""
    for tensor in tensors:
        if (recipe := _delayed.pop(tensor, None)) is not None:
            recorder, view = recipe
            value = recorder.values([view])[0].to(tensor.dtype)
            is_all = value.numel() * value.itemsize == value.untyped_storage().nbytes()
            _lamina.restore(tensor, value if is_all else value.clone(memory_format=torch.contiguous_format))


def cut(parameter: nn.Parameter, into: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[nn.Parameter]:
    """Parameters with parts of the value of another one, which wait for their values if it does.

    Args:
        into: makes views of a tensor.
    """
    if (recipe := _delayed.get(parameter)) is not None:
        recorder, view = recipe
        parts = [recorder.view(part) for part in into(recorder.tensor(view))]
        if all(part is not None for part in parts):
            return [_waiting(recorder, part, parameter) for part in parts]
        initialise([parameter])
    values = (part.clone(memory_format=torch.contiguous_format) for part in into(parameter.detach()))
    return [nn.Parameter(value, parameter.requires_grad) for value in values]


def _waiting(recorder: Recorder, view: View, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(0, dtype=like.dtype), like.requires_grad)
    _lamina.release(parameter, _WHY, torch.empty(view.size, dtype=like.dtype))
    _delayed[parameter] = (recorder, view)
    return parameter


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Gives a parameter or buffer, which stays the same object, another dtype; one that waits for its value will have
    that then."""
    if is_delayed(tensor):
        _lamina.release(tensor, _WHY, torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype))
    else:
        tensor.data = tensor.data.to(dtype)


def forget(tensor: torch.Tensor) -> bool:
    """The tensor will not get its value on this rank. Whether it was waiting for it."""
    return _delayed.pop(tensor, None) is not None


def _settle(recorder: Recorder) -> None:
    """Parameters that are alone in their memory are delayed; all else that was recorded and still lives is made."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    views = [(tensor, view) for tensor in tensors if (view := recorder.view(tensor)) is not None]
    sharers = Counter(view.storage for _, view in views)
    at_once: list[tuple[torch.Tensor, View]] = []
    for tensor, view in views:
        _lamina.release(tensor, _WHY, torch.empty_strided(view.size, view.stride, dtype=view.dtype))
        if isinstance(tensor, nn.Parameter) and sharers[view.storage] == 1:
            _delayed[tensor] = (recorder, view)
        else:
            at_once.append((tensor, view))
    for (tensor, _), value in zip(at_once, recorder.values(view for _, view in at_once), strict=True):
        _lamina.restore(tensor, value)
