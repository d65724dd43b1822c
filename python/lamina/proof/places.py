# SPDX-License-Identifier: Apache-2.0
"""The place where two runs of a region part: the first operation of the script's whose results are others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lamina.util import pytree
from lamina.util.call_sites import place_of_script


@dataclass
class Operation:
    """An operation of a run.

    Attributes:
        name: its function's.
        place: in the script: "train.py:12".
        results: its tensors.
    """

    name: str
    place: str
    results: list[torch.Tensor]

    def __str__(self) -> str:
        return f"{self.name} in {self.place}" if self.place else self.name


class Operations(TorchFunctionMode):
    """The operations of a run outside of sliced layers.

    Args:
        sliced: these layers.

    Attributes:
        found: the operations, in their order.
    """

    def __init__(self, sliced: Sequence[nn.Module]):
        super().__init__()
        self.found: list[Operation] = []
        self._sliced, self._inside = sliced, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, they are recorded. For a run, which leaves no hooks behind."""
        for layer in self._sliced:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)
        with self:
            yield

    def _begin(self, *_: Any) -> None:
        self._inside += 1

    def _end(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if not self._inside and name not in ("__get__", "__set__") and (tensors := pytree.tensors(output)):
            results = [each.detach().clone() for each in tensors]
            self.found.append(Operation(name.strip("_"), place_of_script(), results))
        return output


def first_parted(whole: Sequence[Operation], own: Sequence[Operation], compare: Any) -> Operation | None:
    """The first operation that another one follows in the two runs, or whose results are neither alike, nor parts, nor
    terms of a sum. None where there is none.

    Args:
        compare: gives a verdict for each pair of tensors; collective.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    of_pair: list[Operation] = []
    parted: Operation | None = None
    for left, right in zip(whole, own, strict=False):
        if left.name != right.name or len(left.results) != len(right.results):
            parted = right
            break
        pairs += zip(left.results, right.results, strict=True)
        of_pair += [right] * len(right.results)
    verdicts = compare(pairs)
    return next((each for each, verdict in zip(of_pair, verdicts, strict=True) if verdict == "another"), parted)
