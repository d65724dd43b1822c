# SPDX-License-Identifier: Apache-2.0
"""torch's GradScaler where something stands for parameters in an optimizer's groups: gradients are found where they
are, and an infinity in one rank's shard has all ranks leave the step out. Over partitions it names the one to take."""

import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch.amp import GradScaler

from lamina.errors import UsageError
from lamina.util.settings import replace

Worst = Callable[[torch.optim.Optimizer, float], float]
Holders = Callable[[torch.optim.Optimizer], list[torch.Tensor] | None]
Complete = Callable[[torch.optim.Optimizer], None]


def install(worst: Worst, holders: Holders, complete: Complete, undo: ExitStack) -> None:
    """Until `undo` is closed, whether an optimizer's gradients are finite is `worst(optimizer, what is found here)`: 0
    or 1.

    Args:
        complete: averages, before, what there is of its gradients that no reduction has had.
        holders: lists what has the gradients of an optimizer; None: its own parameters.
    """
    original = GradScaler._unscale_grads_

    def unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict:
        complete(optimizer)
        held = holders(optimizer)
        of = optimizer if held is None else types.SimpleNamespace(param_groups=[{"params": held}])
        found = original(self, of, *args, **kwargs)
        return on_host(self, worst(optimizer, largest(found)))

    replace(undo, GradScaler, "_unscale_grads_", unscale)


def largest(found: dict[torch.device, torch.Tensor]) -> float:
    """The largest of what was found on each device; 0 for nothing. Waits for them."""
    return max((each.item() for each in found.values()), default=0.0)


def on_host(scaler: GradScaler, found: float) -> dict[torch.device, torch.Tensor]:
    """Gives a GradScaler what was found as it keeps it: on the host, where it reads it once more without a wait."""
    device = torch.device(scaler._device)
    return {device: torch.full((), found, dtype=torch.float32, pin_memory=device.type != "cpu")}


def tell_of_skips(optimizer: torch.optim.Optimizer, skipped: Callable[[], None], undo: ExitStack) -> None:
    """Until `undo` is closed, `skipped` is called where a GradScaler leaves a step of the optimizer out."""
    original = GradScaler._maybe_opt_step

    def maybe_step(
        self: GradScaler, of: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, of, state, *args, **kwargs)
        if of is optimizer and largest(state["found_inf_per_device"]) > 0:
            skipped()
        return result

    replace(undo, GradScaler, "_maybe_opt_step", maybe_step)


def forget(scaler: GradScaler) -> None:
    """Forgets what a GradScaler has found in gradients that are forgotten, too."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


def refuse(undo: ExitStack) -> None:
    """Until `undo` is closed, a GradScaler of torch's own is an error, on every rank: those that run no body never
    scale."""
    replace(undo, GradScaler, "_check_scale_growth_tracker", _refused)


def _refused(self: GradScaler, funcname: str) -> NoReturn:
    raise UsageError(
        f"torch.amp.GradScaler.{funcname}() over several partitions: each rank would find infinities in its own part "
        "alone, and the scales of ranks would differ; take lamina.amp.GradScaler, whose arguments are torch's",
        code="optimizer-torch-scaler",
    )
