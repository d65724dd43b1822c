# SPDX-License-Identifier: Apache-2.0
"""A call whose backward computes it again.

[Note: split checkpoints] A call that reaches modules on other ranks is checkpointed reentrantly. It runs without grad
mode, so that nobody keeps a graph, and once more inside the backward, with a graph on every rank. The other kind would
drop only what this rank saved. Everything else is checkpointed without reentrance.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamina.activation_checkpointing.offloading import around_checkpoint
from lamina.calls.arguments import is_cache
from lamina.errors import UsageError
from lamina.job import codec, current
from lamina.util import pytree


def recompute(
    call: Callable, modules: list[nn.Module], preserve_rng_state: bool, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """`call(*args, **kwargs)`, of which only arguments and result are kept until its backward.

    Args:
        call: calls `modules`, and no others that live on other ranks.
        preserve_rng_state: whether the second run draws the random numbers of the first.

    Errors:
        UsageError: a result across ranks has tensors in an object that is no container; they would have no gradient.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if any(elsewhere(part) is not None for module in modules for part in module.modules()):
        return _recompute_split(call, modules, preserve_rng_state, args, kwargs)
    run = functools.partial(call, **kwargs)  # whatever the keywords are called
    with around_checkpoint():
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def elsewhere(module: nn.Module) -> int | None:
    """The partition of a module that another rank owns, None for any other module."""
    model = current.job().partitioned_model if current.is_initialized() else None
    return None if model is None else model.elsewhere(module)


def _recompute_split(
    call: Callable, modules: list[nn.Module], preserve_rng_state: bool, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """See [Note: split checkpoints]. The reentrant kind sees only tensors that are arguments or results themselves."""
    tensors = _tensors((args, kwargs))
    trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
    if not trained and not any(tensor.requires_grad for tensor in tensors):
        return call(*args, **kwargs)
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    output = None

    def run(_: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal output
        here, named = pytree.map_tensors(lambda tensor: given[places[id(tensor)]], (args, kwargs))
        result = call(*here, **named)
        if not torch.is_grad_enabled():
            _check_result(result, type(modules[-1]).__qualname__)
            output = result
        return tuple(_tensors(result))

    # The first argument requires grad, so that parameters get their gradients where no other does.
    root = torch.empty(0, requires_grad=True)
    with around_checkpoint():
        results = checkpoint(run, root, *tensors, use_reentrant=True, preserve_rng_state=preserve_rng_state)
    structure, output = output, None
    by_id = dict(zip(map(id, _tensors(structure)), results, strict=True))
    return pytree.map_tensors(lambda tensor: by_id[id(tensor)], structure)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, each once."""
    return list({id(tensor): tensor for tensor in pytree.tensors(value)}.values())


def _check_result(value: Any, kind: str) -> None:
    if isinstance(value, torch.Tensor):
        return
    parts = pytree.children(value)
    for _, part in parts or ():
        _check_result(part, kind)
    if parts is None and not is_cache(type(value)) and _holds_tensors(value):
        raise UsageError(
            f"a {kind}, checkpointed with parts on other ranks, returned tensors in an object of type "
            f"{type(value).__qualname__}, where they get no gradient: return them in tuples, lists, dictionaries or "
            "dataclasses",
            code="step-checkpoint-result",
        )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (type(None), int, float, str)):
        return False
    try:
        return bool(codec.pack(value)[1])
    except UsageError:  # it cannot travel, nor be looked into
        return False
