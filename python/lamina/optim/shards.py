# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parts of parameters: what they need of one, and what a rank holds of it."""

import torch
from torch import optim

from lamina import _lamina
from lamina.errors import UsageError
from lamina.optim.registry import Needs, needs_of


def require_known(optimizer: optim.Optimizer, key: str, code: str) -> Needs:
    """Returns what an optimizer needs of a parameter; UsageError where that is unknown, or all parameters at once.
    `key`: the one that gives ranks parts of parameters; `code`: the error's."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        raise UsageError(
            f"{kind} with {key}: it measures all parameters of a model at once, and a rank has a part of each: take an "
            "optimizer that updates each parameter by itself",
            code=code,
        )
    if (needs := needs_of(type(optimizer))) is None:
        raise UsageError(
            f"{kind} with {key}: a rank has a part of each parameter, and it is not known whether {kind} looks at more "
            "of one than the element that it updates. Say so before: "
            f'lamina.optim.register_functional_optimizer({kind}, needs="elements"), or needs="whole", with which each '
            "parameter is updated on one rank that has all of it",
            code=code,
        )
    return needs


def parameter_of(tensor: torch.Tensor, sharding: _lamina.Sharding | None) -> torch.Tensor:
    """The parameter of a shard; any other tensor itself."""
    number = None if sharding is None else sharding.find_shard(tensor)
    return tensor if number is None else sharding.parameter(number)


def held_of(parameter: torch.Tensor, sharding: _lamina.Sharding | None) -> torch.Tensor:
    """The shard of a parameter; any other tensor itself."""
    return parameter if sharding is None or sharding.find(parameter) is None else parameter.ds_tensor
