# SPDX-License-Identifier: Apache-2.0
"""Where a trace runs: stand-ins in the place of the model's tensors, and everything as it was afterwards."""

import contextvars
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.job import codec
from lamina.job.ranks import device
from lamina.script_state.generators import Streams
from lamina.script_state.walk import Reach
from lamina.util import pytree
from lamina.util.told import tell

_LISTS = (list, deque)
_DICTIONARIES = (dict, OrderedDict, defaultdict)

Make = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A call of the model: its arguments, and autocast and the context variables around it, which each thread has for
    itself. All else that torch's operations depend on is lent to whoever traces; see [Note: first call] in
    lamina/pipeline/first_call.h."""

    args: tuple
    kwargs: dict[str, Any]
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=lambda: list(map(_autocast, _kinds())))
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def of(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls `root` with these instead. What it sets of context variables is gone afterwards."""
        return self.context.copy().run(root, *args, **kwargs)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Autocast is as there, in this thread; with gradients, and nothing left in autocast's cache."""
        with outside_inference(), torch.enable_grad(), ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Ends inference mode inside. A backward stays in this thread: torch's mode lets go of that, too, and a thread of
    an accelerator would not know what is run here."""
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(False):
        yield


def _kinds() -> list[str]:
    """The types of device that a rank computes on."""
    return list(dict.fromkeys(("cpu", device().type)))


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextmanager
def undisturbed(root: nn.Module, call: Call, reach: Reach | None = None) -> Iterator[Reach]:
    """Afterwards what the model, its arguments and their functions can reach, and all streams of random numbers, are as
    before. Of plain tensors that is for whoever writes them: see `Reach.tensors`.

    Args:
        root: the model.
        call: with these arguments.
        reach: a walk that was made of both before, and is repeatable; None for a new one.
    """
    if reach is None:
        modules = ((path or "the model", module) for path, module in root.named_modules())
        reach = Reach([*modules, ("its arguments", (call.args, call.kwargs))])
    streams = Streams()
    try:
        yield reach
    finally:
        streams.restore()
        reach.restore()
        for name in reach.advanced():
            tell(
                f"{name}, a generator function, has gone on in the trace, and cannot be put back: have it draw where "
                "lamina.is_tracing() is false, or set skip_tracing"
            )


def put_stand_ins(root: nn.Module, make: Make) -> None:
    """Puts `make(tensor)` in the place of every parameter, buffer and tensor that a module under `root` holds, for one
    tensor always the same. Inside `undisturbed`."""
    made: dict[int, torch.Tensor] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                made[id(value)] = make(value)
            return made[id(value)]
        if type(value) in _LISTS:
            value.__init__(list(map(stand_in, value)), *([value.maxlen] if isinstance(value, deque) else []))
        elif type(value) in _DICTIONARIES:
            for key, item in list(value.items()):
                value[key] = stand_in(item)
        return value

    for module in root.modules():
        for name, value in list(module.__dict__.items()):
            if not name.endswith("_hooks") and name != "_modules":
                module.__dict__[name] = stand_in(value)


def copied(value: Any, make: Make) -> Any:
    """Arguments of the model, with `make(tensor)` in the place of every tensor. Objects are copied where they can be:
    the trace changes none of the script's."""
    try:
        data, tensors = codec.pack(value)
        return codec.unpack(data, list(map(make, tensors)))
    except UsageError:
        return pytree.map_tensors(make, value)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in with a tensor's value: of a parameter the same memory, with a gradient of its own; else a copy."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def moved(device: torch.device | None) -> Make:
    """Makes stand-ins with values, on `device`."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if device is None or tensor.device == device:
            return alias(tensor)
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(moved, tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)

    return make
