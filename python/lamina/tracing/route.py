# SPDX-License-Identifier: Apache-2.0
"""The way of one call through a model: what each module itself does between calls of others, in this order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from lamina.util import pytree


@dataclass
class Stretch:
    """The work of a module from the beginning of a call of it, or the end of one that it made, to the next.

    Attributes:
        at: its place among those of all modules.
        forward_us, backward_us: times.
        weights_us: of the backward, the part that only the gradients of parameters need.
        value_bytes: what it hands on: arguments of the module that is called next, or what it returns.
        works: whether it runs an operation, be it a view: then it needs the value.
        reads: bytes of the values that it reads, by the stretch that made them. A call that only hands its arguments on
            reads these.
    """

    at: int
    forward_us: float = 0.0
    backward_us: float = 0.0
    weights_us: float = 0.0
    value_bytes: int = 0
    works: bool = False
    reads: dict[int, int] = field(default_factory=dict)


class Way:
    """Fills in the stretches of each node. The first of a call is there even if the module does nothing in it."""

    def __init__(self, stretches: list[list[Stretch]]):
        self._stretches = stretches
        self._count = 0
        self._open: Stretch | None = None
        self._arguments: Any = None  # of the call, while its first stretch does nothing
        self._makers = Makers()
        self._seen: set[Any] = set()  # values that the open stretch has read

    def enter(self, node: int, arguments: Any) -> None:
        """A call of a node begins."""
        self._hand_on(arguments)
        self._begin(node)
        self._arguments = arguments

    def leave(self, output: Any) -> None:
        """The innermost call ends."""
        if self._open is not None and not self._open.works:
            self._read(pytree.tensors(self._arguments))
        self._hand_on(output)

    def work(self, node: int, inputs: Iterable[torch.Tensor], times_us: tuple[float, float, float]) -> None:
        """The innermost node runs an operation.

        Args:
            node: it.
            inputs: of the operation.
            times_us: of its forward, its backward, and the weight part of that.
        """
        stretch = self._open or self._begin(node)
        stretch.forward_us += times_us[0]
        stretch.backward_us += times_us[1]
        stretch.weights_us += times_us[2]
        stretch.works = True
        self._read(inputs)

    def made(self, outputs: Iterable[torch.Tensor]) -> None:
        """The operation has these results, or has written these tensors."""
        for tensor in outputs:
            self._makers.made(tensor, self._open.at)

    def _begin(self, node: int) -> Stretch:
        self._open = Stretch(self._count)
        self._count += 1
        self._stretches[node].append(self._open)
        return self._open

    def _read(self, tensors: Iterable[torch.Tensor]) -> None:
        reads = self._open.reads
        for tensor in tensors:
            maker = self._makers.of(tensor)
            if maker is None or maker == self._open.at or (name := _name(tensor)) in self._seen:
                continue
            self._seen.add(name)
            reads[maker] = reads.get(maker, 0) + size_bytes([tensor])

    def _hand_on(self, values: Any) -> None:
        if self._open is not None:
            self._open.value_bytes = size_bytes(pytree.tensors(values))
        self._open = self._arguments = None
        self._seen.clear()


class Makers:
    """The stretches that have made tensors. Autograd may hand a view on as another object than the operation returned:
    then who has made the latest tensor in its memory counts."""

    def __init__(self):
        self._of_tensors = WeakTensorKeyDictionary()
        self._of_memory: dict[StorageWeakRef, int] = {}

    def made(self, tensor: torch.Tensor, stretch: int) -> None:
        self._of_tensors[tensor] = stretch
        if tensor.layout is torch.strided:
            self._of_memory[_memory(tensor)] = stretch

    def of(self, tensor: torch.Tensor) -> int | None:
        maker = self._of_tensors.get(tensor)
        if maker is None and tensor.layout is torch.strided:
            maker = self._of_memory.get(_memory(tensor))
        return maker


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _name(tensor: torch.Tensor) -> Any:
    """Equal for objects that are the same part of one memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
