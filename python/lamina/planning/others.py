# SPDX-License-Identifier: Apache-2.0
"""Planners for models of other libraries than torch, which `lamina plan --model` asks."""

from collections.abc import Callable
from typing import Any

# From what builds a model, and from its inputs, to the rows of a plan of operations.
Planner = Callable[[Callable[[], Any], list[str]], list[dict[str, Any]]]

_planners: list[Planner] = []


def add(planner: Planner) -> None:
    """From now on this plans what is built: the model's module imports a library whose models it knows."""
    _planners.append(planner)


def planner() -> Planner | None:
    """The last one that was added; None for models of torch."""
    return _planners[-1] if _planners else None
