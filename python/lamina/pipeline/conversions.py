# SPDX-License-Identifier: Apache-2.0
"""Conversions of a job's model, as `to`, `half`, `cuda` and the like make them."""

from collections.abc import Callable

import torch
from torch import nn

from lamina.job import current
from lamina.model import shards
from lamina.model.places import only_own, without
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life
from lamina.util.told import tell

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


def tell_unmoved(module: nn.Module, device: torch.device | None) -> bool:
    """Returns whether a move of a model that is not cut yet has no effect. World rank 0 says so, and what happens."""
    here = {parameter.device.type for parameter in module.parameters()}
    if device is None or device.type in here or device.type == "meta":
        return False
    if device.type == "cuda" and not torch.cuda.is_available():
        then = "there is no CUDA device here, and it is trained on the CPU"
    else:
        then = "call it once more after the first step, which partitions the model"
    if current.session().rank == 0:
        tell(f'model.to("{device}") had no effect, as no rank is to hold all of the model there: {then}')
    return True
