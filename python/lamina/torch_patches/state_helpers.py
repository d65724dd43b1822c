# SPDX-License-Identifier: Apache-2.0
"""torch's helpers of state dicts (`torch.distributed.checkpoint.state_dict`), of optimizers: these know a parameter by
its object, which has to stand in the optimizer's groups. They are replaced when they meet a model, as they are imported
by then."""

import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch

from lamina.util.settings import replace


def install(check: Callable[[torch.optim.Optimizer], None], undo: ExitStack) -> bool:
    """Until `undo` is closed, these helpers call `check(optimizer)` before anything else. Returns whether they are
    there."""
    helpers = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if helpers is None:
        return False
    original = helpers._init_optim_state

    def init(optimizer: torch.optim.Optimizer) -> None:
        check(optimizer)
        original(optimizer)

    replace(undo, helpers, "_init_optim_state", init)
    return True
