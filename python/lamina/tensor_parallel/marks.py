# SPDX-License-Identifier: Apache-2.0
"""Modules marked to have their layers cut over the ranks of a TP_GROUP.

A mark is kept in the module itself, so that a copy of the module has it too.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lamina.errors import UsageError, refusal
from lamina.torch_patches import scoped
from lamina.util.checks import require_booleans, require_module

_MARK = "_lamina_tensor_parallel"  # a Mark
_PLAN = "_lamina_slicing_plan"  # by set_tensor_parallelism(plan=...)
_HEADS = "_lamina_heads"  # by set_tensor_parallelism(heads=...)


@dataclass(frozen=True)
class Mark:
    """The wishes of a script for a module.

    Attributes:
        enabled: whether its layers are sliced.
        replace: whether it becomes the class that lamina has for its own, where the script has registered none.
        config: arguments of such a class.
        is_led: whether a plan of the script's says how it is sliced, so that it stays what it is.
    """

    enabled: bool
    replace: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    is_led: bool = False


_NONE = Mark(False)
_enabled: contextvars.ContextVar[Mark | None] = contextvars.ContextVar("lamina_tensor_parallelism", default=None)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, replace: bool = False, **tp_config: Any) -> Iterator[None]:
    """Marks the modules that are created inside to have their layers sliced over the ranks of TP_GROUP. Of nested
    contexts the innermost counts.

    Args:
        enabled: whether they are marked.
        replace: whether models of transformers become classes of `lamina.nn` when the model is wrapped, and each of
            torch's Linears is cut; else layers stay what they are. Classes that are registered (`tp_register`) are
            replaced either way, with one rank in TP_GROUP, too.
        tp_config: arguments of the classes that modules become, in the place of those that `init_hook` returns. A name
            that none of them has is told once.
    """
    require_booleans(enabled=enabled, replace=replace)
    token = _enabled.set(Mark(enabled, replace, dict(tp_config)))
    try:
        with scoped.creations(_note_creation):
            yield
    finally:
        _enabled.reset(token)


def set_tensor_parallelism(
    module: nn.Module,
    enabled: bool = True,
    plan: Mapping[str, str] | None = None,
    replace: bool = False,
    heads: str | int | None = None,
    **tp_config: Any,
) -> None:
    """As `tensor_parallelism`, for a module and those under it, before the model is wrapped.

    Args:
        module: a module of the model.
        enabled: whether its layers are sliced.
        plan: how, where it is not known of the module's class: a style, "colwise" or "rowwise", for the name of each
            Linear or Conv1D below `module`, in which "*" stands for one part: {"layers.*.q_proj": "colwise", ...}. What
            a layer cut by columns gives lies in parts; one cut by rows takes such parts, and gives the whole. Nothing
            under it is replaced.
        heads: says, with a plan, how many heads the modules have whose layers are cut by columns, where that stands
            under a name of their own. "nhead" or "config.heads" is an attribute of theirs; its number becomes this
            rank's. A number is for code that takes it from sizes.
        replace, tp_config: see `tensor_parallelism`.

    Errors:
        UsageError: not a module, not a plan, or heads without one.
    """
    require_module(module, "set_tensor_parallelism()")
    require_booleans(enabled=enabled, replace=replace)
    if plan is not None and not _is_plan(plan):
        raise UsageError(
            f"set_tensor_parallelism(plan=...) takes a dictionary of names and styles, such as "
            f'{{"layers.*.q_proj": "colwise"}}, not {plan!r}',
            code="tp-plan",
        )
    is_name = isinstance(heads, str) and all(map(str.isidentifier, heads.split(".")))
    if heads is not None and (plan is None or not (is_name or (type(heads) is int and heads > 0))):
        raise refusal("no-heads", repr(heads))
    mark = Mark(enabled, replace, dict(tp_config), plan is not None)
    for part in module.modules():
        part.__dict__[_MARK] = mark
        part.__dict__.pop(_PLAN, None)
        part.__dict__.pop(_HEADS, None)
    if plan is not None and enabled:
        module.__dict__[_PLAN], module.__dict__[_HEADS] = dict(plan), heads


def mark_of(module: nn.Module) -> Mark:
    """The wishes for a module."""
    return module.__dict__.get(_MARK, _NONE)


def is_marked(module: nn.Module) -> bool:
    """True where its layers are to be sliced."""
    return mark_of(module).enabled


def plan_of(module: nn.Module) -> dict[str, str] | None:
    """The plan that it was given; None for none."""
    return module.__dict__.get(_PLAN)


def said_heads(module: nn.Module) -> str | int | None:
    """The name or number of heads that came with its plan; None for none."""
    return module.__dict__.get(_HEADS)


def _is_plan(plan: Any) -> bool:
    return isinstance(plan, Mapping) and all(isinstance(each, str) for pair in plan.items() for each in pair)


def _note_creation(module: nn.Module) -> None:
    if (mark := _enabled.get()) is not None:
        module.__dict__[_MARK] = mark
