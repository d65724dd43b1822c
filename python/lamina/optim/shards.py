# SPDX-License-Identifier: Apache-2.0
"""Optimizers over shards: the shards take the places of their parameters in the groups, and all ranks of a sharding
group step together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from lamina import _lamina
from lamina.errors import UsageError
from lamina.optim import functional

_ELEMENTWISE: set[type[optim.Optimizer]] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.Adamax),
    *(optim.ASGD, optim.NAdam, optim.RAdam),
    *(functional.SGD, functional.Adam, functional.AdamW, functional.Adagrad, functional.Adadelta, functional.RMSprop),
    *(functional.Rprop, functional.Adamax, functional.NAdam, functional.RAdam, functional.QHM, functional.FusedAdam),
}


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """UsageError for an optimizer that may look at more of a parameter than the element that it updates."""
    if type(optimizer) not in _ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__name__} with sharded_data_parallel_degree: a rank has a shard of each parameter, and "
            "only optimizers that update each element by itself give what they give with all of it; these do: "
            f"{', '.join(sorted({kind.__name__ for kind in _ELEMENTWISE}))}",
            code="shard-optimizer",
        )


def give_shards(optimizer: optim.Optimizer, sharding: _lamina.Sharding) -> None:
    """Puts the shards into the places of their parameters, in place."""
    require_elementwise(optimizer)
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if (number := sharding.find(parameter)) is not None:
                group["params"][place] = parameter.ds_tensor
                if (state := optimizer.state.pop(parameter, None)) is not None:
                    optimizer.state[parameter.ds_tensor] = part_of(state, parameter, sharding, number)


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
