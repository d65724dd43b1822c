# SPDX-License-Identifier: Apache-2.0
"""Kinds of things that a script has, with one meaning for all that walk through them."""

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, GeneratorType, ModuleType
from typing import Any

import torch

MISSING = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice)
PLAIN += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
LARGE = 1000  # elements of a container that are looked into
ITERATORS = (itertools.count, itertools.cycle, *(type(iter(made)) for made in ([], (), range(0), {}.values(), "")))
RUNNING = (*ITERATORS, GeneratorType)  # what each use moves on
# Special methods that run in no call.
ASIDE = {"__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"}
ASIDE |= {"__copy__", "__dir__", "__init_subclass__", "__class_getitem__"}

_TORCHS = {"torch", "numpy", "lamina", "_lamina", "triton"} | set(sys.stdlib_module_names)
_LIBRARIES = {"torchvision", "transformers", "matplotlib"}  # also where they are installed from a checkout
HIDDEN = {"__dict__", "__weakref__"}


class InPlaceOfValue:
    """Stands in a class for what it has, while a step runs.

    Attributes:
        of_class: what it has; None for nothing.
    """

    of_class: Any = None


def module_of(made: Any) -> str:
    """The name of the file that a class or function is of, or of a file itself; "torch" where that is not told."""
    name = made.__name__ if isinstance(made, ModuleType) else getattr(made, "__module__", None)
    return name if isinstance(name, str) and name else "torch"


def is_torchs(made: Any) -> bool:
    """True for classes, functions and files of Python, torch, NumPy and ourselves, or the name of such a file. A walk
    goes past them, and into other libraries, which models are made of."""
    return (made if isinstance(made, str) else module_of(made)).partition(".")[0] in _TORCHS


def is_of_the_script(made: Any) -> bool:
    """True where a class, function or file is neither Python's nor of a library: see `is_of_a_library`."""
    return not is_of_a_library(module_of(made))


@functools.cache
def is_of_a_library(name: str) -> bool:
    """True for a file of that name of Python's, or one that was installed, as a file in a folder for that. What a
    library keeps for itself, such as its registries, is as little the script's as torch's own is."""
    if name.partition(".")[0] in _TORCHS | _LIBRARIES:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and any(part in ("site-packages", "dist-packages") for part in Path(file).parts)


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the slots of a class, by name."""
    return {name: vars(each)[name] for each, name in _slots(kind)}


@functools.lru_cache(10_000)
def _slots(kind: type) -> list[tuple[type, str]]:
    """The names of slots, each with the class that has it."""
    found = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names = {slots} if isinstance(slots, str) else set(slots) - HIDDEN
        found += [(each, name) for name in names if hasattr(vars(each).get(name), "__delete__")]
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has, those in slots first."""
    slots = {name: getattr(value, name, MISSING) for name in slots_of(type(value))}
    return {name: each for name, each in slots.items() if each is not MISSING} | dict(getattr(value, "__dict__", {}))
