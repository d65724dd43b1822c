# SPDX-License-Identifier: Apache-2.0
"""Generators of random numbers: those of this process and of the rank's device, and those that objects have."""

import contextlib
import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from lamina import _lamina
from lamina.script_state.kinds import PLAIN

_DEPTH, _MOST, _ALL = 8, 100, 10_000  # how deep they are looked for, in containers of how many items, in all


@dataclass(frozen=True)
class Source:
    """A source of random numbers, or bytes: what has a state and holds no objects.

    Attributes:
        name: for messages.
        kind: the name of its class.
        get, put: read its state, and set it.
    """

    name: str
    kind: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def of_torch() -> Iterator[Source]:
    """Torch's: of the host, and by the name of its type of the rank's device, where that is another."""
    yield Source("torch", "Generator", torch.get_rng_state, torch.set_rng_state)
    if (own := _lamina.rank_generator()) is not None:
        yield Source(own.device.type, "Generator", own.get_state, own.set_state)


def not_of_torch() -> Iterator[Source]:
    """Python's, and NumPy's where something has imported it."""
    yield Source("python", "Random", random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield Source("numpy", "RandomState", numpy.random.get_state, numpy.random.set_state)


def of_process() -> Iterator[Source]:
    """The generators that functions draw from."""
    return itertools.chain(of_torch(), not_of_torch())


class Streams:
    """Generators as they are now: all of the process, or these."""

    def __init__(self, sources: Iterable[Source] | None = None):
        self._states = [(source, source.get()) for source in (of_process() if sources is None else sources)]

    def have_advanced(self) -> bool:
        """True where torch's numbers, on the host or the rank's device, have been drawn since."""
        return not all(torch.equal(each.get(), before) for each, before in self._states if each.kind == "Generator")

    def restore(self) -> None:
        """Puts them back."""
        for source, before in self._states:
            source.put(before)


def generator(name: str, value: Any) -> Source | None:
    """Returns how the state of a generator of random numbers is read and set; None for anything else, and for one that
    has none."""
    kind = type(value).__name__
    if isinstance(value, torch.Generator):
        return Source(name, kind, lambda: value.get_state().numpy().tobytes(), functools.partial(_set_torchs, value))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(name, kind, value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    if isinstance(value, numpy.random.RandomState):
        return Source(name, kind, value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Source(name, kind, lambda: bits.state, functools.partial(setattr, bits, "state"))
    return None


def states(*holders: Any) -> dict[str, Any]:
    """The states of the process's generators, and of those that these objects have as attributes, in containers or in
    closures, and so on."""
    return {each.name: each.get() for each in of_process()} | {
        "own": {each.name: each.get() for each in _held_by(holders)}
    }


def put_states(states: dict[str, Any], *holders: Any) -> None:
    """Puts them into these states."""
    for here, found in ((states, of_process()), (states.get("own", {}), _held_by(holders))):
        for each in found:
            if each.name in here:
                each.put(here[each.name])


def _held_by(holders: Iterable[Any]) -> Iterator[Source]:
    """The generators that these objects have, by their paths, which states that were saved go by."""
    numpy = sys.modules.get("numpy")
    others = (*PLAIN, type, ModuleType, torch.Tensor, *([numpy.ndarray] if numpy else []))
    waiting, seen = deque((str(number), 0, holder) for number, holder in enumerate(holders)), set()
    while waiting and len(seen) < _ALL:
        path, depth, holder = waiting.popleft()
        if id(holder) in seen or isinstance(holder, others):
            continue
        seen.add(id(holder))
        if (found := generator(path, holder)) is not None:
            yield found
        elif depth < _DEPTH:
            waiting += [(f"{path}.{name}", depth + 1, each) for name, each in _parts_of(holder)]


def _parts_of(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, (dict, list, tuple)):
        named = holder.items() if isinstance(holder, dict) else enumerate(holder)
        return list(named) if len(holder) <= _MOST else []
    if isinstance(holder, functools.partial):
        return [("func", holder.func), ("args", holder.args), ("keywords", holder.keywords)]
    if isinstance(holder, MethodType):
        return [("self", holder.__self__)]
    if isinstance(holder, FunctionType):
        return [(number, _contents_of(cell)) for number, cell in enumerate(holder.__closure__ or ())]
    return list(getattr(holder, "__dict__", {}).items())


def _contents_of(cell: CellType) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        return cell.cell_contents


def _set_torchs(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
