# SPDX-License-Identifier: Apache-2.0
"""Modules placed on partitions by hand.

With `auto_partition`, which is the default, `partition` contexts do not count and `set_partition` does: lamina places
the others. Without it both count, and all else is on `default_partition`.

A placement is kept in the module itself, so that a copy of the module has it too.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator

from torch import nn

from lamina.errors import UsageError, refusal, said
from lamina.job import current
from lamina.torch_patches import scoped
from lamina.util.checks import require_module

_SET = "_lamina_placed"  # by set_partition
_CREATED = "_lamina_created_in"  # by the partition() around its creation

_index: contextvars.ContextVar[int | None] = contextvars.ContextVar("lamina_partition", default=None)


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the modules created inside on a partition, where `auto_partition` is off; else it is ignored, as scripts
    expect that are run either way. Of nested contexts the innermost counts; what is in none goes to
    `default_partition`. May be used before `init`.

    Args:
        index: the partition, below `partitions`. Without a launcher there is only partition 0, and any index is taken.

    Errors:
        UsageError: not an index of a partition.
    """
    token = _index.set(_checked(index) if _contexts_count() else _an_index(index))
    try:
        with scoped.creations(_note_creation):
            yield
    finally:
        _index.reset(token)


def set_partition(module: nn.Module, index: int) -> None:
    """Places a module, and those under it that have no `set_partition` of their own, on a partition.

    Args:
        module: a module of the model, before the model is partitioned.
        index: the partition, below `partitions`. Without a launcher there is only partition 0, and any index is taken.

    Errors:
        UsageError: not an index of a partition, or the model is partitioned.
    """
    require_module(module, "set_partition()")
    index = _checked(index)
    if current.is_initialized() and any(part is module for part in current.job().model.modules()):
        current.before_cut("set_partition()")
    for part in module.modules():
        part.__dict__.pop(_CREATED, None)
    module.__dict__[_SET] = index


def of(module: nn.Module) -> int | None:
    """The partition that `module` was placed on, None for none."""
    placed = module.__dict__.get(_SET)
    if placed is None and _contexts_count():
        placed = module.__dict__.get(_CREATED)
    alone = current.is_initialized() and (current.session().size == 1 or current.session().is_collapsed)
    return 0 if alone and placed is not None else placed


def carry(original: nn.Module, replacement: nn.Module) -> None:
    """Places a module as the one is placed that it takes the place of."""
    for key in (_SET, _CREATED):
        if key in original.__dict__:
            replacement.__dict__[key] = original.__dict__[key]


def ignored(modules: Iterable[nn.Module]) -> list[str]:
    """A line for whoever wonders why a `partition` context has no effect, where one has none."""
    count = sum(_CREATED in module.__dict__ for module in modules)
    if not count or _contexts_count():
        return []
    return [said("ignored-scopes", count, "were created in partition() contexts")]


def _contexts_count() -> bool:
    return not current.is_initialized() or not current.session().config.auto_partition


def _checked(index: int) -> int:
    index = _an_index(index)
    if not current.is_initialized():
        return index
    session = current.session()
    if session.size == 1 or session.is_collapsed:
        return 0
    if index >= session.config.partitions:
        raise UsageError(f"there is no partition {index}: `partitions` is {session.config.partitions}")
    return index


def _an_index(index: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise refusal("not-a-partition", repr(index))
    return index


def _note_creation(module: nn.Module) -> None:
    if (index := _index.get()) is not None:
        module.__dict__[_CREATED] = index
