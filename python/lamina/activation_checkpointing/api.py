# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: what a module computed on its way is dropped, and computed again for its backward."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lamina.activation_checkpointing.recompute import elsewhere, recompute
from lamina.errors import UsageError
from lamina.modules.tree import is_called
from lamina.pipeline.distributed_model import DistributedModel
from lamina.util.checks import require_module


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """From now on a module is checkpointed wherever it is called; every rank says so. The last call for it counts.

    Copies of the module, pickled ones too, are checkpointed as well. Its names in state dicts stay.

    Args:
        module: a module, before or after it is distributed; of an nn.ModuleList or nn.ModuleDict each child, of an
            nn.Sequential its children as `strategy` says.
        preserve_rng_state: whether the second run draws the random numbers of the first.
        pack_args_as_tuple: for these containers; accepted, and needed for nothing: tuples are passed on as they are.
        strategy: for an nn.Sequential, see `checkpoint_sequential`.

    Errors:
        UsageError: not a module; `strategy` or `pack_args_as_tuple` for one without children to be called one after the
            other; no such strategy; groups in a Sequential whose class has a forward of its own.
    """
    if isinstance(module, DistributedModel):
        module = module.get_module()
    require_module(module, "set_activation_checkpointing()")
    size = _group_size(strategy)
    if isinstance(module, nn.Sequential):
        _set_sequential(module, preserve_rng_state, strategy, size)
    elif strategy != "each":
        raise UsageError(f"strategy {strategy!r} is for an nn.Sequential, not {type(module).__name__}")
    elif isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not is_called(module):
        for child in module.children():
            set_activation_checkpointing(child, preserve_rng_state)
    elif pack_args_as_tuple:
        raise UsageError(f"pack_args_as_tuple is for an nn.Sequential, not {type(module).__name__}")
    else:
        _set(module, preserve_rng_state)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, checkpointed; what it calls may live on any rank.

    Args:
        module: a module; what lies on other ranks is computed again there.
        args, kwargs: its arguments.
        preserve_rng_state: whether the second run draws the random numbers of the first.

    Errors:
        UsageError: not a module.
    """
    require_module(module, "checkpoint()")
    return recompute(module, [module], preserve_rng_state, args, kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """`sequential(input)`, checkpointed in groups; only what passes between groups is kept.

    Args:
        sequential: its children are called one after the other.
        input: a tensor, or any value that the first child takes.
        strategy: "each": every child by itself; "contiguous": consecutive children on the same partition together;
            "group_2", "group_3", ...: as many of these together.
        preserve_rng_state: whether the second run draws the random numbers of the first.
        pack_args_as_tuple: accepted, and needed for nothing: tuples are passed on as they are.

    Errors:
        UsageError: not an nn.Sequential, or one whose class has a forward of its own; no such strategy.
    """
    size = _group_size(strategy)
    _check_sequential(sequential, "checkpoint_sequential()")
    return _run_groups(list(sequential), size, preserve_rng_state, input)


# Modules that are checkpointed wherever they are called.


@dataclasses.dataclass(eq=False)
class _CheckpointedForward:
    """Stands as `forward` in a module's own attributes, so that hooks run once and copies are checkpointed too."""

    module: nn.Module
    own: Callable | None  # the module's, where it is not its class's
    preserve_rng_state: bool
    group_size: int | None = None  # of the children of a Sequential

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.group_size is not None:
            return _run_groups(list(self.module), self.group_size, self.preserve_rng_state, *args, **kwargs)
        return recompute(self.plain, [self.module], self.preserve_rng_state, args, kwargs)

    @property
    def plain(self) -> Callable:
        return self.own or functools.partial(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)


def _set(module: nn.Module, preserve_rng_state: bool, group_size: int | None = None) -> None:
    _clear(module)
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = _CheckpointedForward(module, own, preserve_rng_state, group_size)


def _clear(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if isinstance(forward, _CheckpointedForward):
        del module.__dict__["forward"]
        if forward.own is not None:
            module.__dict__["forward"] = forward.own


def _set_sequential(module: nn.Sequential, preserve_rng_state: bool, strategy: str, size: int) -> None:
    if strategy != "each":
        _check_sequential(module, f"set_activation_checkpointing() with the strategy {strategy!r}")
    _clear(module)
    for child in module:
        _clear(child)
    if strategy != "each":
        _set(module, preserve_rng_state, size)
        return
    for child in module:  # each on its owner
        _set(child, preserve_rng_state)


# Calls.

_WHOLE_RUN = 0  # as the size of groups


def _run_groups(children: list[nn.Module], size: int, preserve_rng_state: bool, input: Any) -> Any:
    for group in _groups(children, size):
        run = functools.partial(_run_chain, group)
        input = recompute(run, group, preserve_rng_state, (input,), {})
    return input


def _run_chain(modules: list[nn.Module], input: Any) -> Any:
    for module in modules:
        input = module(input)
    return input


def _groups(children: Iterable[nn.Module], size: int) -> list[list[nn.Module]]:
    groups: list[list[nn.Module]] = []
    owner = None
    for child in children:
        if not groups or elsewhere(child) != owner or len(groups[-1]) == size:
            groups.append([])
        owner = elsewhere(child)
        groups[-1].append(child)
    return groups


# Checks.


def _group_size(strategy: str) -> int:
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return _WHOLE_RUN
    prefix, _, number = strategy.partition("_") if isinstance(strategy, str) else ("", "", "")
    if prefix == "group" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise UsageError(f'a strategy is "each", "contiguous" or "group_2", "group_3", ..., not {strategy!r}')


def _check_sequential(module: Any, what: str) -> None:
    if not isinstance(module, nn.Sequential):
        raise UsageError(f"{what} takes an nn.Sequential, not {type(module).__name__}")
    forward = module.__dict__.get("forward")
    own = forward.own if isinstance(forward, _CheckpointedForward) else forward
    if own is not None or type(module).forward is not nn.Sequential.forward:
        raise UsageError(f"{what}: {type(module).__name__} has a forward of its own; give its children one by one")
