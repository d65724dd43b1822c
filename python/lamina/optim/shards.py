# SPDX-License-Identifier: Apache-2.0
"""Optimizers over shards: the shards take the places of their parameters in the groups, and all ranks of a sharding
group step together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from lamina import _lamina
from lamina.errors import UsageError
from lamina.optim.registry import Needs, needs_of
from lamina.optim.whole import WholeParameters


def require_known(optimizer: optim.Optimizer) -> Needs:
    """Returns what an optimizer needs of a parameter; UsageError where that is unknown, or all parameters at once."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        raise UsageError(
            f"{kind} with sharded_data_parallel_degree: it measures all parameters of a model at once, and a rank has "
            "a shard of each: take an optimizer that updates each parameter by itself",
            code="shard-optimizer",
        )
    if (needs := needs_of(type(optimizer))) is None:
        raise UsageError(
            f"{kind} with sharded_data_parallel_degree: a rank has a shard of each parameter, and it is not known "
            f"whether {kind} looks at more of one than the element that it updates. Say so before: "
            f'lamina.optim.register_functional_optimizer({kind}, needs="elements"), or needs="whole", with which each '
            "parameter is updated on one rank that has all of it",
            code="shard-optimizer",
        )
    return needs


def give_shards(
    optimizer: optim.Optimizer, sharding: _lamina.Sharding, wholes: WholeParameters | None
) -> WholeParameters | None:
    """Puts the shards into the places of their parameters, in place.

    Args:
        wholes: what this returned the last time.

    Returns:
        Owners of the parameters, for an optimizer that needs all of one.
    """
    if require_known(optimizer) == "whole" and wholes is None:
        wholes = WholeParameters(optimizer, sharding)
    states = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if (number := sharding.find(parameter)) is not None:
                group["params"][place] = parameter.ds_tensor
                if (state := optimizer.state.pop(parameter, None)) is not None:
                    states[number] = state
    if wholes is not None:
        wholes.spread()
    for number, state in states.items():
        parameter = sharding.parameter(number)
        if wholes is None:
            optimizer.state[parameter.ds_tensor] = part_of(state, parameter, sharding, number)
        elif wholes.owns(number):
            optimizer.state[parameter.ds_tensor] = state
    return wholes


def parameter_of(tensor: torch.Tensor, sharding: _lamina.Sharding | None) -> torch.Tensor:
    """The parameter of a shard; any other tensor itself."""
    number = None if sharding is None else sharding.find_shard(tensor)
    return tensor if number is None else sharding.parameter(number)


def part_of(
    state: Mapping[str, Any], parameter: torch.Tensor, sharding: _lamina.Sharding, number: int
) -> dict[str, Any]:
    """The state of a parameter's shard from that of the parameter."""

    def part(value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        return sharding.part_of(number, value) if is_like else value

    return {name: part(value) for name, value in state.items()}


def gathered(state: Mapping[str, Any], parameter: torch.Tensor, sharding: _lamina.Sharding, number: int) -> dict:
    """The state of a parameter from those of its shards; collective over the sharding group."""

    def whole(value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == parameter.ds_tensor.shape
        return sharding.gather(number, value) if is_like else value

    return {name: whole(value) for name, value in state.items()}
