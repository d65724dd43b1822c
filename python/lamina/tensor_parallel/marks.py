# SPDX-License-Identifier: Apache-2.0
"""Modules marked to have their layers cut over the ranks of a TP_GROUP.

A mark is kept in the module itself, so that a copy of the module has it too.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lamina.errors import UsageError
from lamina.torch_patches import scoped
from lamina.util.checks import require_booleans, require_module

_MARK = "_lamina_tensor_parallel"  # whether it is to be sliced
_PLAN = "_lamina_slicing_plan"  # by set_tensor_parallelism(plan=...)

_enabled: contextvars.ContextVar[bool | None] = contextvars.ContextVar("lamina_tensor_parallelism", default=None)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> Iterator[None]:
    """Marks the modules that are created inside to have their layers sliced over the ranks of TP_GROUP. Of nested
    contexts the innermost counts. With `tensor_parallel_degree` 1 it changes nothing.

    Args:
        enabled: whether they are marked.
        tp_config: options of sliced layers; none has an effect yet.
    """
    require_booleans(enabled=enabled)
    token = _enabled.set(enabled)
    try:
        with scoped.creations(_note_creation):
            yield
    finally:
        _enabled.reset(token)


def set_tensor_parallelism(
    module: nn.Module, enabled: bool = True, plan: Mapping[str, str] | None = None, **tp_config: Any
) -> None:
    """As `tensor_parallelism`, for a module and those under it, before the model is wrapped.

    Args:
        module: a module of the model.
        enabled: whether its layers are sliced.
        plan: how, where it is not known of the module's class: a style, "colwise" or "rowwise", for the name of each
            Linear or Conv1D below `module`, in which "*" stands for one part: {"layers.*.q_proj": "colwise", ...}. What
            a layer cut by columns gives lies in parts; one cut by rows takes such parts, and gives the whole.
        tp_config: options of sliced layers; none has an effect yet.

    Errors:
        UsageError: not a module, or not a plan.
    """
    require_module(module, "set_tensor_parallelism()")
    require_booleans(enabled=enabled)
    if plan is not None and not _is_plan(plan):
        raise UsageError(
            f"set_tensor_parallelism(plan=...) takes a dictionary of names and styles, such as "
            f'{{"layers.*.q_proj": "colwise"}}, not {plan!r}',
            code="tp-plan",
        )
    for part in module.modules():
        part.__dict__[_MARK] = enabled
        part.__dict__.pop(_PLAN, None)
    if plan is not None and enabled:
        module.__dict__[_PLAN] = dict(plan)


def is_marked(module: nn.Module) -> bool:
    """True where its layers are to be sliced."""
    return module.__dict__.get(_MARK, False)


def plan_of(module: nn.Module) -> dict[str, str] | None:
    """The plan that it was given; None for none."""
    return module.__dict__.get(_PLAN)


def _is_plan(plan: Any) -> bool:
    return isinstance(plan, Mapping) and all(isinstance(each, str) for pair in plan.items() for each in pair)


def _note_creation(module: nn.Module) -> None:
    if (enabled := _enabled.get()) is not None:
        module.__dict__[_MARK] = enabled
