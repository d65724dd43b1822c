# SPDX-License-Identifier: Apache-2.0
"""torch's helpers of state dicts (`torch.distributed.checkpoint.state_dict`), of optimizers: these know a parameter by
its object, which has to stand in the optimizer's groups. They are replaced when they meet a model, as they are imported
by then."""

import sys
from collections.abc import Callable
from types import ModuleType

import torch

_originals: dict[ModuleType, Callable] = {}  # one at most


def install(check: Callable[[torch.optim.Optimizer], None]) -> bool:
    """From now on these helpers call `check(optimizer)` before anything else. Returns whether anything was done."""
    helpers = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if helpers is None or helpers in _originals:
        return False
    _originals[helpers] = original = helpers._init_optim_state

    def init(optimizer: torch.optim.Optimizer) -> None:
        check(optimizer)
        original(optimizer)

    helpers._init_optim_state = init
    return True


def remove() -> None:
    """They are torch's again."""
    for helpers, original in _originals.items():
        helpers._init_optim_state = original
    _originals.clear()
