# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parts of parameters: what they need of one, and what a rank holds of it."""

import torch
from torch import optim

from lamina import _lamina
from lamina.optim.registry import needs_of


def why_not_parts(optimizer: optim.Optimizer) -> str:
    """Says why an optimizer cannot update parts of parameters, "" where it can."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return (
            "it measures all parameters of a model at once, and a rank has a part of each: take an optimizer that "
            "updates each parameter by itself"
        )
    if needs_of(type(optimizer)) is not None:
        return ""
    return (
        f"a rank has a part of each parameter, and it is not known whether {kind} looks at more of one than the "
        "element that it updates. Say so before: "
        f'lamina.optim.register_functional_optimizer({kind}, needs="elements"), or needs="whole", with which each '
        "parameter is updated on one rank that has all of it"
    )


def parameter_of(tensor: torch.Tensor, sharding: _lamina.Sharding | None) -> torch.Tensor:
    """The parameter of a shard; any other tensor itself."""
    number = None if sharding is None else sharding.find_shard(tensor)
    return tensor if number is None else sharding.parameter(number)


def held_of(parameter: torch.Tensor, sharding: _lamina.Sharding | None) -> torch.Tensor:
    """The shard of a parameter; any other tensor itself."""
    return parameter if sharding is None or sharding.find(parameter) is None else parameter.ds_tensor
