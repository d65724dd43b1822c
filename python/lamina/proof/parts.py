# SPDX-License-Identifier: Apache-2.0
"""Results of a module of which each rank of a TP_GROUP has a part, as maps of its own heads.

What is returned in the place of such a result is a stand-in for the whole, which the ranks put together when code uses
it. Most is never used: a model of transformers returns maps of attention, and drops them. A region that is given such a
result of its own computes with the part, as with keys of a cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina.util import pytree


@dataclass(frozen=True)
class ResultCut:
    """The dimension along which each rank has a part, how much each has, and the name of these ranks."""

    dimension: int
    sizes: tuple[int, ...]
    team: str


class PartOfResult:
    """A stand-in for a whole of which this rank has a part.

    Attributes:
        part: that this rank has.
        cut: how it is cut.
    """

    def __init__(self, part: torch.Tensor, cut: ResultCut):
        self.part, self.cut = part, cut
        self._whole: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The whole; collective over the TP_GROUP when it is asked for first."""
        if self._whole is None:
            # Sizes may be those of another batch along no dimension but the cut one.
            self._whole = torch.ops.lamina.tp_gather(self.part, self.cut.dimension, self.cut.sizes, self.cut.team)
        return self._whole

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = wholes((args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: PartOfResult, *args: Any) -> Any:
        return getattr(self.whole(), name)(*wholes(args))

    return operate


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow matmul rmatmul neg abs eq ne lt le gt ge"
_OPERATORS += " getitem setitem len iter bool float int repr format mod and or invert"
for _name in _OPERATORS.split():
    setattr(PartOfResult, f"__{_name}__", _operator(f"__{_name}__"))
PartOfResult.__hash__ = object.__hash__  # type: ignore[method-assign]


def wholes(value: Any) -> Any:
    """A value with wholes in the places of stand-ins; collective where there are such."""
    return pytree.map_values(lambda each: each.whole() if isinstance(each, PartOfResult) else None, value)


def own(value: Any) -> Any:
    """A value with this rank's parts in the places of stand-ins."""
    return pytree.map_values(lambda each: each.part if isinstance(each, PartOfResult) else None, value)


def given(output: Any, cuts: Mapping[int, ResultCut]) -> Any:
    """A result with stand-ins for those of its tensors, by number, of which there is a part."""
    if not cuts:
        return output
    numbers = iter(range(len(pytree.tensors(output))))

    def stand_in(tensor: torch.Tensor) -> Any:
        cut = cuts.get(next(numbers))
        if cut is None:
            return tensor
        return (
            torch.ops.lamina.tp_gather(tensor, cut.dimension, cut.sizes, cut.team)
            if _is_compiling()
            else (PartOfResult(tensor, cut))
        )

    return pytree.map_tensors(stand_in, output)


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()
