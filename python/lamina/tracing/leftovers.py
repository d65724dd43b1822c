# SPDX-License-Identifier: Apache-2.0
"""Fake tensors that a trace has left where it could not put back what was there: in caches of functions, mostly.

A training dies of one. Caches forget it, for what is not in them is made again; of any other place a line says where it
is.
"""

import functools
import gc
from types import FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_MOST = 100  # tuples that hold one, or one another


def clear(mode: FakeTensorMode) -> list[str]:
    """Has caches forget the tensors of that mode. Returns lines on those that are elsewhere."""
    if not _left(mode):
        return []
    gc.collect()
    for fake in (left := _left(mode)):
        for holder, part in _holders(fake, left):
            _forget(holder, part)
    left = fake = holder = part = None
    gc.collect()
    left = _left(mode)
    places = [_name(*found[0]) for fake in left if (found := _holders(fake, left))]
    return [
        f"a tensor of the trace is still in {place}, where a training cannot compute with it: have the model make "
        "it in __init__, or set skip_tracing"
        for place in dict.fromkeys(places)
    ]


def _left(mode: FakeTensorMode) -> list[FakeTensor]:
    return [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode]


def _holders(fake: FakeTensor, left: list[FakeTensor]) -> list[tuple[Any, Any]]:
    """Objects that hold it, or a tuple with it in it, and what they hold."""
    parts = [fake]
    for part in parts:
        above = gc.get_referrers(part)
        ours = {id(left), id(parts), id(above)}
        parts += [each for each in above if type(each) is tuple and len(parts) < _MOST]
    inside = {id(part) for part in parts}
    return [
        (each, part)
        for part in parts
        for each in gc.get_referrers(part)
        if id(each) not in inside | ours and type(each) not in (FrameType, FakeTensor)
    ]


def _forget(holder: Any, part: Any) -> None:
    if type(holder) is functools._lru_cache_wrapper:
        holder.cache_clear()
    elif type(holder) is dict and _owner(holder) is None:
        for key in [key for key, value in holder.items() if value is part]:
            del holder[key]


def _owner(names: dict) -> Any:
    """The object whose attributes these are; None for other dictionaries."""
    return next((each for each in gc.get_referrers(names) if getattr(each, "__dict__", None) is names), None)


def _name(holder: Any, part: Any) -> str:
    owner = _owner(holder) if type(holder) is dict else None
    kind = f"an object of {type(owner or holder).__qualname__}"
    named = getattr(owner, "__name__", None) or kind
    key = next((key for key, value in holder.items() if value is part), None) if type(holder) is dict else None
    return f"{named}.{key}" if isinstance(key, str) and owner is not None else named
