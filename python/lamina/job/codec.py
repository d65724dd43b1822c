# SPDX-License-Identifier: Apache-2.0
"""Objects that the engine has no encoding for, pickled between the ranks of one job.

Their tensors stay out of the pickle and travel as tensors; a module of the model travels as its number and becomes the
receiver's own copy.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lamina.errors import InternalError, UsageError
from lamina.job import current
from lamina.util import devices

_TENSOR_TYPES = (torch.Tensor, nn.Parameter)


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """`value` as bytes, and the very tensors it holds, each once.

    Errors:
        UsageError: a part of it cannot be pickled, or is a tensor of a class of its own.
    """
    return pack_without(value, lambda _: False)[:2]


def pack_without(value: Any, stays: Callable[[Any], bool]) -> tuple[bytes, list[torch.Tensor], list[Any]]:
    """As `pack`, and the objects in it that stay here, as `stays` tells: the receiver puts its own in their places."""
    file = io.BytesIO()
    pickler = _Pickler(file, stays)
    try:
        pickler.dump(value)
    except UsageError:
        raise
    except Exception as error:
        kind = type(value)
        raise UsageError(
            f"an object of type {kind.__module__}.{kind.__qualname__} cannot be sent to another rank: "
            f"{type(error).__name__}: {error}",
            code="step-cannot-travel",
        ) from error
    return file.getvalue(), pickler.tensors, pickler.staying


def unpack(data: bytes, tensors: list[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
    """The inverse of `pack`, with `tensors` in the place of those packed, and `objects` of those that stayed."""
    return _Unpickler(io.BytesIO(data), tensors, objects).load()


def _model_modules() -> list[nn.Module]:
    """The model and its modules, in the same order on every rank."""
    if not current.is_initialized() or not current.job().has_model:
        return []
    model = current.job().model
    return [model, *model.module.modules()]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, stays: Callable[[Any], bool]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.staying: list[Any] = []
        self._stays = stays
        self._places: dict[int, int] = {}  # in `tensors`, by id
        self._numbers: dict[int, int] | None = None  # of modules, by id

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, torch.Tensor):
            return "tensor", self._place(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if self._stays(value):
            self.staying.append(value)
            return "object", len(self.staying) - 1
        return None

    def reducer_override(self, value: Any) -> Any:
        return devices.reduced(value)

    def _place(self, tensor: torch.Tensor) -> int:
        if type(tensor) not in _TENSOR_TYPES:
            raise UsageError(
                f"a tensor of class {type(tensor).__qualname__} cannot be sent to another rank",
                code="step-cannot-travel",
            )
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]

    def _module(self, module: nn.Module) -> tuple[str, int] | None:
        if self._numbers is None:
            self._numbers = {id(part): number for number, part in enumerate(_model_modules())}
        number = self._numbers.get(id(module))
        if number is not None:
            return "module", number
        if next(module.parameters(), None) is not None:
            raise UsageError(
                f"a {type(module).__qualname__} with parameters, which is no part of the distributed model, cannot be "
                "sent to another rank",
                code="step-cannot-travel",
            )
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], objects: Sequence[Any]):
        super().__init__(file)
        self._held = {"tensor": tensors, "object": objects}

    def persistent_load(self, saved: tuple[str, int]) -> Any:
        kind, number = saved
        held = _model_modules() if kind == "module" else self._held[kind]
        if not 0 <= number < len(held):
            raise InternalError.found(f"an object from another rank names {kind} {number}; there are {len(held)}")
        return held[number]
