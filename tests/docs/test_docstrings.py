# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public functions with three or more arguments have a line for each of them."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import pytest

MODULES = (
    "lamina",
    "lamina.amp",
    "lamina.dist",
    "lamina.integrations.lightning",
    "lamina.integrations.transformers",
    "lamina.nn",
    "lamina.optim",
    "lamina.optimizers",
    "lamina.remote",
    "lamina.trainer",
    "lamina.trainer.loggers",
    "lamina.trainer.losses",
    "lamina.trainer.metrics",
    "lamina.trainer.monitors",
    "lamina.trainer.optimizers",
    "lamina.trainer.schedulers",
)
FEW = 2  # arguments that a sentence tells
OF_EVENTS = ["event", "state", "logger"]  # of callbacks and algorithms: one form for all
SECTION = re.compile(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def public(module: str) -> Iterator[tuple[str, Callable, type | None]]:
    """Names a module's functions and classes, and methods of these with their class."""
    there = importlib.import_module(module)
    names = getattr(there, "__all__", None)
    home = "lamina" if names else there.__name__  # else what it imports is among its names
    for name in names or dir(there):
        what = getattr(there, name)
        if name.startswith("_") or not callable(what) or not str(getattr(what, "__module__", "")).startswith(home):
            continue
        yield name, what, None
        for inner, method in vars(what).items() if inspect.isclass(what) else ():
            if not inner.startswith("_") and inspect.isfunction(method):
                yield f"{name}.{inner}", method, what


def arguments_of(what: Callable) -> list[str]:
    try:
        return [name for name in inspect.signature(what).parameters if name != "self" and not name.startswith("_")]
    except ValueError:  # of an object of the engine's: the stubs have it
        return []


def is_another_s(what: Callable, owner: type | None, arguments: list[str]) -> bool:
    """True where a class of another library tells of the arguments, whose place this takes, or where lamina's base
    does."""
    if owner is not None:
        return any(what.__name__ in vars(base) for base in owner.__mro__[1:])
    bases = what.__mro__[1:-1] if inspect.isclass(what) else ()
    return any("__init__" in vars(base) and arguments_of(base) == arguments for base in bases)


def told(docstring: str) -> tuple[list[str], bool]:
    """The names in its section of arguments, and whether a line there says where all others are told."""
    section = SECTION.search(docstring)
    if section is None:
        return [], False
    return re.findall(r"\w+", " ".join(NAMED.findall(section[1]))), "all others: see" in section[1]


@pytest.mark.parametrize("module", MODULES)
def test_each_argument_has_its_line(module):
    silent = {}
    for name, what, owner in public(module):
        arguments = arguments_of(what)
        if len(arguments) <= FEW or arguments == OF_EVENTS or is_another_s(what, owner, arguments):
            continue
        named, leads_on = told(inspect.getdoc(what) or "")
        missing = [] if leads_on else [each for each in arguments if each not in named]
        if missing or not named:
            silent[name] = missing
    assert not silent
