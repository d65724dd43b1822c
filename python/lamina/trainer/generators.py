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

from lamina.util.reach import Source, generator

_DEPTH, _MOST, _ALL = 8, 100, 10_000  # how deep they are looked for, in containers of how many items, in all
_OTHERS = str, bytes, type, types.ModuleType, torch.Tensor


def generators(*holders: Any) -> dict[str, Any]:
    """Their states: the process's, and those of what these objects hold, and so on."""
    return {each.name: each.get() for each in _of_process()} | {
        "own": {each.name: each.get() for each in _held_by(holders)}
    }


def set_generators(states: dict[str, Any], *holders: Any) -> None:
    """Puts them into these states."""
    for here, found in ((states, _of_process()), (states.get("own", {}), _held_by(holders))):
        for each in found:
            if each.name in here:
                each.put(here[each.name])


def _of_process() -> Iterator[Source]:
    """The generators that functions of modules draw from; NumPy's where something has imported it."""
    yield Source("torch", "Generator", torch.get_rng_state, torch.set_rng_state)
    yield Source("python", "Random", random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield Source("numpy", "RandomState", numpy.random.get_state, numpy.random.set_state)


def _held_by(holders: Iterable[Any]) -> Iterator[Source]:
    """The generators that these objects have as attributes, in containers or closures, by their paths."""
    numpy = sys.modules.get("numpy")
    waiting, seen = deque((str(number), 0, holder) for number, holder in enumerate(holders)), set()
    while waiting and len(seen) < _ALL:
        path, depth, holder = waiting.popleft()
        if id(holder) in seen or isinstance(holder, _OTHERS) or (numpy and isinstance(holder, numpy.ndarray)):
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
    if isinstance(holder, types.MethodType):
        return [("self", holder.__self__)]
    if isinstance(holder, types.FunctionType):
        return [(number, _contents_of(cell)) for number, cell in enumerate(holder.__closure__ or ())]
    return list(getattr(holder, "__dict__", {}).items())


def _contents_of(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        return cell.cell_contents
