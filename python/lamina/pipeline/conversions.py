# SPDX-License-Identifier: Apache-2.0
"""Conversions of a job's model, as `to`, `half`, `cuda` and the like make them."""

from collections.abc import Callable

import torch

from lamina.errors import UsageError
from lamina.job import current, ranks
from lamina.model import shards
from lamina.model.places import only_own, without
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life

Convert = Callable[[torch.Tensor], torch.Tensor]


def convert(life: Life, gradients: Gradients, fn: Convert, apply: Callable[[], object]) -> None:
    """Converts a model: of what other ranks own there is only the metadata to change.

    Args:
        life, gradients: of the model.
        fn: makes a tensor what it becomes.
        apply: applies that to all tensors that are here, as torch does.
    """
    job = life.job_if_any()
    if life.whole:
        life.model.conversions += 1
    if life.whole_everywhere or life.whole:
        # Where conversions swap parameters with others, nobody else may hold them: torch counts.
        if torch.__future__.get_swap_module_params_on_conversion() and job is not None:
            gradients.let_go()
        apply()
    else:
        sharded = shards.require_unchanged(fn)
        with only_own(life.model) as foreign, without(life.model.tree.root, sharded):
            apply()
        for name, tensor, owner in foreign:
            like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (like.dtype, like.device) != (tensor.dtype, tensor.device):
                whole = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
                current.session().release(tensor, name, owner, whole)
        life.model.conversions += 1
    if job is not None:
        gradients.watch()  # its parameters may be others now


def require_own(device: torch.device | None) -> None:
    """Raises UsageError where a model is moved to an accelerator that the rank does not compute on."""
    own = ranks.device()
    if device is None or device.type in ("cpu", "meta") or device in (own, torch.device(own.type)):
        return
    raise UsageError(
        f"a model was moved to {device}, but this rank computes on {own}, where its model goes by itself: leave the "
        "move out, or name the device in lamina.init (the key `device`, or LAMINA_DEVICE)",
        code="model-device",
    )
