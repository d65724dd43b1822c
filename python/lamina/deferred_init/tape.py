# SPDX-License-Identifier: Apache-2.0
"""Operations on tensors without memory, kept until somebody needs a value.

[Note: recorded values] Inside a Recorder large tensors of the CPU are made on the meta device, and what is done to them
is kept as a list. A value is had by doing the part of the list again that led to it, with memory. Operations that draw
random numbers keep the state of the generator, and draw once in vain, so that all others draw what they would have.
While the Recorder is active, its tensors say that they are on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from lamina.errors import UsageError
from lamina.util.settings import default_dtype, setting

SMALL_BYTES = 1 << 16  # nothing is gained by leaving these out


@dataclass(frozen=True)
class View:
    """How a tensor lies in a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Outside:
    """A tensor with a value of its own that took part."""

    tensor: torch.Tensor
    version: int


@dataclass
class _Operation:
    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[View | None]
    written: list[View]
    default_dtype: torch.dtype
    generator: torch.Generator | None  # of one that draws, and its state
    state: torch.Tensor | None


class Recorder(TorchDispatchMode):
    """See [Note: recorded values]. Used as a context; afterwards values can still be had."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that addresses stay theirs
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._disguise = _Disguise(self)

    def __enter__(self) -> Recorder:
        self._disguise.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._disguise.__exit__(*error)

    def view(self, tensor: torch.Tensor) -> View | None:
        """How `tensor` lies in a recorded storage; None for any other tensor."""
        if not tensor.is_meta or (key := tensor.untyped_storage()._cdata) not in self._storages:
            return None
        return View(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor without memory that lies so in its storage."""
        empty = torch.empty(0, dtype=view.dtype, device="meta")
        return empty.set_(self._storages[view.storage], view.offset, view.size, view.stride)

    def values(self, views: Iterable[View]) -> list[torch.Tensor]:
        """The values, with memory; those of one storage share theirs."""
        views = list(views)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._replay({view.storage for view in views}, len(self._operations), views)

    def value(self, argument: Any) -> Any:
        """The value of a recorded tensor; anything else as it is."""
        view = self.view(argument) if isinstance(argument, torch.Tensor) else None
        return argument if view is None else self.values([view])[0]

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # we are to see the tensors as they are
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not any(self.view(tensor) for tensor in tensors) and (tensors or not _makes_large(func, args, kwargs)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        to_recorded = [self.view(tensor) is not None for tensor in written]
        try:
            if not all(to_recorded):
                raise NotImplementedError(f"{func} writes to a tensor with a value")
            output = _on_meta(func, args, kwargs)
        except Exception:
            if any(to_recorded):
                raise
            return func(*tree_map(self.value, args), **tree_map(self.value, kwargs))  # it needs values
        return self._record(func, args, kwargs, written, output)

    def _record(self, func: Callable, args: tuple, kwargs: dict, written: list, output: Any) -> Any:
        outputs = [value for value in tree_iter(output) if isinstance(value, torch.Tensor)]
        fresh = [value for value in outputs if self.view(value) is None]
        for tensor in fresh:
            self._storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        if not fresh and not written:
            return output  # a view
        if fresh and "dtype" in _names(func) and not kwargs.get("dtype"):
            kwargs = {**kwargs, "dtype": fresh[0].dtype}
        new = {id(tensor) for tensor in fresh}
        operation = _Operation(
            func,
            tree_map(self._described, args),
            tree_map(self._described, kwargs),
            [self.view(value) if id(value) in new else None for value in outputs],
            [self.view(tensor) for tensor in written],
            torch.get_default_dtype(),
            *self._drawn(func, args, kwargs, written),
        )
        for view in (*operation.written, *filter(None, operation.outputs)):
            self._writers[view.storage].append(len(self._operations))
        self._operations.append(operation)
        return output

    def _drawn(self, func: Callable, args: tuple, kwargs: dict, written: list) -> tuple:
        """The generator that an operation draws from, and its state before; it has drawn afterwards."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None, None
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        overwritten = {id(tensor) for tensor in written}

        def value(argument: Any) -> Any:
            if id(argument) in overwritten:
                return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
            return self.value(argument)

        func(*tree_map(value, args), **tree_map(value, kwargs))
        return generator, state

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (view := self.view(value)) is None and value.is_meta:
            raise UsageError(
                "a tensor of the meta device takes part in an initialisation that is delayed", code="model-delayed"
            )
        return view or _Outside(value, value._version)

    # Doing it again.

    def _needed(self, storages: set[int], before: int) -> list[int]:
        """The operations, in order, that the content of these storages comes from."""
        needed: set[int] = set()
        open_ends = [(storage, before) for storage in storages]
        while open_ends:
            storage, limit = open_ends.pop()
            for number in self._writers[storage]:
                if number < limit and number not in needed:
                    needed.add(number)
                    operation = self._operations[number]
                    arguments = tree_iter((operation.args, operation.kwargs))
                    open_ends += [(view.storage, number) for view in arguments if isinstance(view, View)]
        return sorted(needed)

    @torch.no_grad()
    def _replay(self, storages: set[int], before: int, views: list[View]) -> list[torch.Tensor]:
        made: dict[int, torch.UntypedStorage] = {}
        for number in self._needed(storages, before):
            operation = self._operations[number]
            for view, value in zip(operation.outputs, _do_again(operation, made), strict=True):
                if view is not None:
                    made[view.storage] = _lying_as(view, value).untyped_storage()
        return [_tensor(view, made) for view in views]


class _Disguise(TorchFunctionMode):
    """Has recorded tensors look like tensors of the CPU, for code that treats those of the meta device apart."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _LOOKS and self._recorder.view(args[0]) is not None:
            return _LOOKS[func]
        if func in _READS:
            args = tree_map(self._recorder.value, args)
        if func == torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))  # torch's would be on the meta device
        return func(*args, **(kwargs or {}))


_LOOKS = {
    torch.Tensor.is_meta.__get__: False,
    torch.Tensor.is_cpu.__get__: True,
    torch.Tensor.device.__get__: torch.device("cpu"),
}
_READS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr)


def _do_again(operation: _Operation, made: dict[int, torch.UntypedStorage]) -> list[torch.Tensor]:
    def value(argument: Any) -> Any:
        if isinstance(argument, View):
            return _tensor(argument, made)
        if isinstance(argument, _Outside):
            if argument.tensor._version != argument.version:
                raise UsageError(
                    "a tensor that a delayed initialisation was made from has been changed since", code="model-delayed"
                )
            return argument.tensor
        return argument

    with ExitStack() as stack:
        stack.enter_context(default_dtype(operation.default_dtype))
        if (generator := operation.generator) is not None:
            stack.enter_context(setting(operation.state, generator.get_state, generator.set_state))
        output = operation.function(*tree_map(value, operation.args), **tree_map(value, operation.kwargs))
    return [value for value in tree_iter(output) if isinstance(value, torch.Tensor)]


def _tensor(view: View, made: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype).set_(made[view.storage], view.offset, view.size, view.stride)


def _lying_as(view: View, value: torch.Tensor) -> torch.Tensor:
    """The value with the strides it was recorded with."""
    if value.stride() == view.stride and value.storage_offset() == view.offset == 0:
        return value
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(value)


def _names(func: Callable) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def _makes_large(func: Callable, args: tuple, kwargs: dict) -> bool:
    """True where an operation without tensors makes a large one on the CPU."""
    if "device" not in _names(func) or torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    output = _on_meta(func, args, kwargs)
    return isinstance(output, torch.Tensor) and output.numel() * output.element_size() > SMALL_BYTES


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The operation without memory. Fails where that cannot be."""
    if "device" in _names(func):
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            raise NotImplementedError("somebody wants it in real memory")
        kwargs = {**kwargs, "device": "meta"}

    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return func(*tree_map(moved, args), **tree_map(moved, kwargs))


def _written(func: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [
        value
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_iter(given.get(argument.name))
        if isinstance(value, torch.Tensor)
    ]
