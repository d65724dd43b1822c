# SPDX-License-Identifier: Apache-2.0
"""The random generators of this process: torch's on the host, Python's and NumPy's; and those that objects have."""

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DEPTH, _MOST, _ALL = 8, 100, 10_000  # how deep they are looked for, in containers of how many items, in all
_OTHERS = str, bytes, type, types.ModuleType, torch.Tensor


def generators(*holders: Any) -> dict[str, Any]:
    """Their states, as plain containers: the process's, and those of what these objects hold, and so on."""
    version, numbers, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = list(numpy.random.get_state())
    return found | {"own": {path: _state_of(each) for path, each in _held_by(holders)}}


def set_generators(states: dict[str, Any], *holders: Any) -> None:
    """Puts them into these states."""
    version, numbers, gauss = states["python"]
    torch.set_rng_state(states["torch"])
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(states["numpy"]))
    own = states.get("own", {})
    for path, each in _held_by(holders):
        if path in own:
            _set_state(each, own[path])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if hasattr(generator, "get_state"):
        return list(generator.get_state())
    return _as_texts(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif hasattr(generator, "set_state"):
        generator.set_state(tuple(state))
    else:
        generator.bit_generator.state = _as_numbers(state)


def _held_by(holders: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The generators that these objects have as attributes, in containers or closures, and their paths."""
    numpy = sys.modules.get("numpy")
    kinds = torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ())
    waiting, seen = deque((str(number), 0, holder) for number, holder in enumerate(holders)), set()
    while waiting and len(seen) < _ALL:
        path, depth, holder = waiting.popleft()
        if id(holder) in seen or isinstance(holder, _OTHERS) or (numpy and isinstance(holder, numpy.ndarray)):
            continue
        seen.add(id(holder))
        if isinstance(holder, kinds):
            if not isinstance(holder, random.SystemRandom):
                yield path, holder
        elif depth < _DEPTH:
            waiting += [(f"{path}.{name}", depth + 1, each) for name, each in _parts_of(holder)]


def _parts_of(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, (dict, list, tuple)):
        named = holder.items() if isinstance(holder, dict) else enumerate(holder)
        return list(named) if len(holder) <= _MOST else []
    if isinstance(holder, functools.partial):
        return [("func", holder.func), ("args", holder.args), ("keywords", holder.keywords)]
    if isinstance(holder, types.MethodType):
        return [("self", holder.__self__)]
    if isinstance(holder, types.FunctionType):
        return [(number, _contents_of(cell)) for number, cell in enumerate(holder.__closure__ or ())]
    return list(getattr(holder, "__dict__", {}).items())


def _contents_of(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        return cell.cell_contents


def _as_texts(state: dict[str, Any]) -> dict[str, Any]:
    """NumPy's state: its numbers have more than 64 bits."""
    return {
        name: _as_texts(value) if isinstance(value, dict) else str(value) if isinstance(value, int) else value
        for name, value in state.items()
    }


def _as_numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _as_numbers(value) if isinstance(value, dict) else int(value) if str(value).isdigit() else value
        for name, value in state.items()
    }
