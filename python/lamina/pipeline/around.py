# SPDX-License-Identifier: Apache-2.0
"""Changes that a step body makes around itself: a meter that it updates, a list to which it adds, a number that counts.

The rank that leads runs the body; a script goes on with such things on all ranks of the pipeline, as with the input of
a schedule. So they go to the others with the outputs of the last microbatch that ends, and are made there. Parts of the
model, optimizers, and objects of libraries in which more than numbers and tensors change are not among them.
"""

import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from lamina.job import current
from lamina.pipeline import other_random
from lamina.script_state.changes import Changes, Difference, Snapshot, differences
from lamina.script_state.holders import Attributes, Cache, Cell, ClassAttributes, Names
from lamina.script_state.kinds import PLAIN, is_of_the_script
from lamina.script_state.walk import HOLDERS, Reach
from lamina.util import pytree

_CODE = (ModuleType, FunctionType, type)
_MOST = 3_000  # objects, in each step
_DATA = (*PLAIN, torch.Tensor, list, dict, set, tuple)
_NOT_OURS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Around:
    """The surroundings of a step's body.

    Args:
        function: the body.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._before: Snapshot | None = None
        self._roots: list[Any] = []
        self._told: set[Any] = set()

    def begin(self, owner: tuple, args: tuple, kwargs: dict[str, Any]) -> None:
        """A step begins, on all ranks."""
        roots = self._roots_of(owner, args, kwargs)
        is_same = [id(root) for _, root in roots] == [id(root) for _, root in self._roots]
        if self._before is None or not is_same or not self._before.reach.refresh():
            self._roots, self._before = roots, Snapshot(_reach(roots))
            self._tell_limit(self._before.reach)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        self._before.note(other_random.sources(), tensors)

    def changes(self) -> list[Any]:
        """Returns what has changed since, as it travels, when all bodies have ended."""
        found = [each for each in differences(self._before.reach) if _is_brought(each)]
        changes = self._before.changes(found, lambda part, error: self._tell(part.first(), _said(error)))
        return list(changes) if any(changes) else []

    def apply(self, changes: list[Any]) -> None:
        """Makes these here, on another rank; but for what this one has changed itself meanwhile."""
        self._before.apply(Changes(*changes), self._tell)

    def _roots_of(self, owner: tuple, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        given = [*((str(at), value) for at, value in enumerate(args)), *kwargs.items()]
        objects = [(f"argument {name}", value) for name, value in given if _is_given_whole(value)]
        return [("the step function", self._function), *(("self", each) for each in owner), *objects]

    def _tell_limit(self, reach: Reach) -> None:
        if not reach.is_whole and _MOST not in self._told:
            self._told.add(_MOST)
            warnings.warn(
                f"the step function reaches more than {_MOST:,} objects: what it changes in others than the nearest of "
                "them stays on the rank that leads; return it from the step function, which gives it to all ranks",
                stacklevel=2,
            )

    def _tell(self, name: str, why: str) -> None:
        if name and name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"{name} is changed by the step function on the rank that leads, and stays as it is on another one "
                f"({why}): return it from the step function, which gives it to all ranks",
                stacklevel=2,
            )


def _is_given_whole(argument: Any) -> bool:
    """True for what every microbatch gets as it is, and not pieces of it."""
    if isinstance(argument, torch.Tensor):
        return False
    if isinstance(argument, (list, dict, set, bytearray)):
        return not pytree.tensors(argument)
    return hasattr(argument, "__dict__")


def _reach(roots: list[tuple[str, Any]]) -> Reach:
    model = current.job().model
    modules = {id(model), *map(id, model.modules())}

    def follow(value: Any) -> bool:
        is_parameter = isinstance(value, nn.Parameter)
        return id(value) not in modules and not is_parameter and not isinstance(value, _NOT_OURS)

    return Reach(roots, follow, _MOST)


def _is_brought(difference: Difference) -> bool:
    holder = difference.holder
    if isinstance(holder, Cache):
        return False
    if isinstance(holder, (Names, Cell, ClassAttributes)):
        brought = {key: value for key, value in difference.set.items() if not isinstance(value, _CODE)}
        # Ours watch attributes, on each rank.
        difference.set = {key: value for key, value in brought.items() if _is_data(value)}
        return bool(difference.set or difference.gone)
    if isinstance(holder, Attributes) and _is_a_librarys(holder.held):
        return all(isinstance(value, _DATA) for value in difference.set.values())
    return True


def _is_data(value: Any) -> bool:
    return not type(value).__module__.startswith("lamina")


def _is_a_librarys(held: Any) -> bool:
    """True for an object of an installed package, which may hold files and the like."""
    return not isinstance(held, (*HOLDERS, type, FunctionType)) and not is_of_the_script(type(held))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
