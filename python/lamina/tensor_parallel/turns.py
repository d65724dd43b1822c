# SPDX-License-Identifier: Apache-2.0
"""Calls of a region, in which the ranks of a TP_GROUP compute with the batches of all of them.

[Note: turns of batches] Batches take turns: all ranks compute with that of the first, then with that of the second, and
so on; each keeps what came of its own. A turn has all that the rank has given, of any shape, and its random numbers, so
it computes what that rank would with whole layers, to the sample. Side by side in one tensor, batches would have to be
of one shape, and what is given would have to say which of its dimensions is the batch's.

Backwards, gradients of what came of each batch go to all ranks, which compute the turns' gradients together; each keeps
those of what it has given. Inside they are divided by the number of batches: gradients of parameters are means over
these, as they are where ranks have whole layers.
"""

import contextvars
import copy
import dataclasses
import enum
import itertools
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lamina import _lamina
from lamina.errors import DesyncError, UsageError
from lamina.job import codec
from lamina.script_state.generators import of_torch
from lamina.script_state.kinds import PLAIN
from lamina.tensor_parallel.kept import Kept
from lamina.torch_patches import compiled
from lamina.util import pytree

_taken: contextvars.ContextVar[bool] = contextvars.ContextVar("lamina_turns", default=False)

# Values in which nothing is hidden.
_OPEN = (*PLAIN, tuple, list, dict, set, frozenset, type, enum.Enum)
_OPEN += (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


@dataclass
class Turns:
    """The ranks that take turns.

    Attributes:
        team: the name under which operators find them.
        size, index: how many they are, and which one this is.
    """

    team: str
    size: int
    index: int
    _others: "weakref.WeakKeyDictionary[Any, list[Any]]" = field(
        default_factory=weakref.WeakKeyDictionary, repr=False, compare=False
    )

    def __getstate__(self) -> tuple[str, int, int]:
        return self.team, self.size, self.index

    def __setstate__(self, state: tuple[str, int, int]) -> None:
        self.__init__(*state)

    def others(self, owned: Any) -> list[Any]:
        """For each rank the one that stands here for its own: it is what this one was when it was first seen."""
        if owned not in self._others:
            if held := _held_tensors(owned):
                raise UsageError(
                    f"a {type(owned).__qualname__} that holds a tensor {list(held[0].shape)} is given to a sliced "
                    "module, and with prescaled_batch: false the other ranks of the TP_GROUP have none of it: make it "
                    "empty before the model is called, give tensors, or take prescaled_batch: true",
                    code="tp-outside",
                )
            self._others[owned] = [copy.deepcopy(owned) for _ in range(self.size)]
        return [*self._others[owned][: self.index], owned, *self._others[owned][self.index + 1 :]]

    def gather(self, part: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        """All ranks' bytes."""
        return torch.ops.lamina.tp_gather(part, 0, sizes, self.team).split(sizes)


@dataclass
class _Kind:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: torch.Size
    device: str
    requires_grad: bool

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class _Given:
    """Arguments that a rank gives to its turn.

    Attributes:
        packed: all but tensors.
        tensors: of what kind these are.
        generators: their states.
        modes: whether there are gradients, and whether the module trains: alike on all ranks.
    """

    packed: bytes
    tensors: list[_Kind]
    generators: list[bytes]
    modes: tuple[bool, bool]


def are_taken() -> bool:
    """True in a turn."""
    return _taken.get()


@compiled.left_alone
def take(
    turns: Turns, kept: Kept, region: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """The result of `forward`, which is called in a turn of each rank's batch; collective over the TP_GROUP.

    Errors:
        UsageError: something is given that the others cannot have.
        DesyncError: the ranks differ in whether they train.
    """
    if _lamina.is_alone():
        with _turn():
            return forward(*args, **kwargs)
    packed, own, staying = codec.pack_without((args, kwargs), _stays)
    statistics = kept.statistics(region)
    own = [*own, *statistics]
    is_on = torch.is_grad_enabled()
    device = next((each.device for each in itertools.chain(region.parameters(), own)), torch.device("cpu"))
    kinds = [_Kind(each.dtype, each.shape, each.device.type, is_on and each.requires_grad) for each in own]
    mine = _Given(packed, kinds, _generators(), (is_on, region.training))
    given, values = _exchanged(turns, mine, own, device)
    if len({each.modes for each in given}) > 1:
        raise DesyncError(
            "the ranks of a TP_GROUP call a sliced module with and without gradients, or in training and in "
            "evaluation: let all do the same",
            code="tp-order",
        )
    received = _enter(turns, given, values, own)
    objects = [turns.others(each) for each in staying]
    outputs = []
    kept.begin(region)
    for index, (rank, tensors) in enumerate(zip(given, received, strict=True)):
        _set_generators(rank.generators)
        last = len(tensors) - len(statistics)
        its_args, its_kwargs = codec.unpack(rank.packed, tensors[:last], [each[index] for each in objects])
        with _turn(), kept.turn(index, tensors[last:]):
            outputs.append(forward(*its_args, **its_kwargs))
        if index == turns.index:
            after = _generators()
    _set_generators(after)
    return _leave(turns, outputs)


@contextmanager
def _turn() -> Iterator[None]:
    token = _taken.set(True)
    try:
        yield
    finally:
        _taken.reset(token)


def _stays(value: Any) -> bool:
    return not isinstance(value, _OPEN) and not dataclasses.is_dataclass(value)


def _held_tensors(value: Any, depth: int = 4) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if depth == 0 or isinstance(value, nn.Module):
        return []
    parts = [child for _, child in pytree.children(value) or ()] or list(getattr(value, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _held_tensors(part, depth - 1)]


def _generators() -> list[bytes]:
    """The states of torch's generators."""
    return [each.get().numpy().tobytes() for each in of_torch()]


def _set_generators(states: list[bytes]) -> None:
    for each, state in zip(of_torch(), states, strict=True):
        each.put(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# Values between ranks, as bytes: those of all tensors of a device, one after the other. They travel from there, so that
# nobody waits for it.


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tensors_of(data: torch.Tensor, kinds: list[_Kind]) -> list[torch.Tensor]:
    found = []
    for kind, part in zip(kinds, data.split([kind.size for kind in kinds]), strict=True):
        tensor = torch.empty(kind.shape, dtype=kind.dtype, device=data.device)
        _bytes_of(tensor).copy_(part)
        found.append(tensor.to(kind.device) if tensor.device.type != kind.device else tensor)
    return found


@torch.no_grad()
def _exchanged(
    turns: Turns, given: _Given, own: list[torch.Tensor], device: torch.device
) -> tuple[list[_Given], list[list[torch.Tensor]]]:
    head = torch.frombuffer(bytearray(pickle.dumps(given)), dtype=torch.uint8)
    here = torch.cat([head, *(_bytes_of(each) for each in own if each.device.type == "cpu")])
    there = [_bytes_of(each) for each in own if each.device.type != "cpu"]
    lengths = torch.tensor([head.numel(), here.numel(), sum(each.numel() for each in there)])
    heads, of_hosts, of_devices = zip(*(each.tolist() for each in turns.gather(lengths, [3] * turns.size)), strict=True)
    sent = turns.gather(here, list(of_hosts))
    everyone = [pickle.loads(data[:size].numpy().tobytes()) for size, data in zip(heads, sent, strict=True)]
    left = [{"cpu": data[size:]} for size, data in zip(heads, sent, strict=True)]
    if any(of_devices):
        body = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *there])
        for data, on_device in zip(left, turns.gather(body, list(of_devices)), strict=True):
            data[device.type] = on_device
    return everyone, [_tensors_by_device(data, given.tensors) for data, given in zip(left, everyone, strict=True)]


def _tensors_by_device(data: dict[str, torch.Tensor], kinds: list[_Kind]) -> list[torch.Tensor]:
    found = {
        name: iter(_tensors_of(part, [kind for kind in kinds if kind.device == name])) for name, part in data.items()
    }
    return [next(found[kind.device]) for kind in kinds]


# Gradients.


class _Enter(torch.autograd.Function):
    """Values of all ranks come of those that this one has given."""

    @staticmethod
    def forward(
        ctx: Any, turns: Turns, first: int, values: list[torch.Tensor], link: torch.Tensor, *own: torch.Tensor
    ) -> Any:
        ctx.turns, ctx.own = turns, slice(first, first + len(own))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, None, *(each * ctx.turns.size for each in gradients[ctx.own])


class _Leave(torch.autograd.Function):
    """Results of this rank's batch, of those of all."""

    @staticmethod
    def forward(ctx: Any, turns: Turns, counts: list[int], *results: torch.Tensor) -> Any:
        first = sum(counts[: turns.index])
        ctx.turns = turns
        ctx.kinds = _by_rank([_Kind(each.dtype, each.shape, each.device.type, True) for each in results], counts)
        return tuple(each.clone() for each in results[first : first + counts[turns.index]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        own = [
            _bytes_of((each / ctx.turns.size).to(kind.dtype))
            for each, kind in zip(gradients, ctx.kinds[ctx.turns.index], strict=True)
        ]
        sizes = [sum(kind.size for kind in kinds) for kinds in ctx.kinds]
        gathered = ctx.turns.gather(torch.cat(own), sizes)
        return None, None, *_tensors_of(torch.cat(gathered), list(itertools.chain(*ctx.kinds)))


def _by_rank(values: list[Any], counts: list[int]) -> list[list[Any]]:
    left = iter(values)
    return [[next(left) for _ in range(count)] for count in counts]


def _enter(
    turns: Turns, given: list[_Given], values: list[list[torch.Tensor]], own: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The values; their gradients go back to those who have given them."""
    kinds = [rank.tensors for rank in given]
    through = [
        [value for value, kind in zip(tensors, its, strict=True) if kind.requires_grad]
        for tensors, its in zip(values, kinds, strict=True)
    ]
    if not any(through):
        return values
    mine = [each for each, kind in zip(own, kinds[turns.index], strict=True) if kind.requires_grad]
    link = torch.zeros((), requires_grad=True)  # where this rank's own have no gradient, and others' have
    first = sum(map(len, through[: turns.index]))
    linked = iter(_Enter.apply(turns, first, list(itertools.chain(*through)), link, *mine))
    return [
        [next(linked) if kind.requires_grad else value for value, kind in zip(tensors, its, strict=True)]
        for tensors, its in zip(values, kinds, strict=True)
    ]


def _leave(turns: Turns, outputs: list[Any]) -> Any:
    """This rank's own output, whose gradients go to all."""
    results = [[each for each in pytree.tensors(output) if each.requires_grad] for output in outputs]
    counts = [len(each) for each in results]
    if not any(counts):
        return outputs[turns.index]
    left = iter(_Leave.apply(turns, counts, *(each for rank in results for each in rank)))
    return pytree.map_tensors(lambda each: next(left) if each.requires_grad else each, outputs[turns.index])
