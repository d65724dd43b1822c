# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpoints in the host's memory: see [Note: offloading] in lamina/runtime/offload.h."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lamina import _lamina
from lamina.job import current
from lamina.job.ranks import device


def around_checkpoint() -> AbstractContextManager[Any]:
    """Around a checkpoint: with `offload_activations` what it keeps goes to the host's memory. Tensors of the CPU stay
    where they are, which is said once."""
    job = current.job_if_any()
    if job is None or not job.session.config.offload_activations:
        return nullcontext()
    offload = job.own(_offload)

    def pack(tensor: torch.Tensor) -> torch.Tensor | _lamina.KeptActivation:
        kept = offload.keep(tensor)
        return tensor if kept is None else kept

    def unpack(kept: torch.Tensor | _lamina.KeptActivation) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.take()

    return saved_tensors_hooks(pack, unpack)


def _offload() -> _lamina.Offload:
    if device().type == "cpu":
        warnings.warn(
            "offload_activations: activations lie in the memory of the host already, and stay there", stacklevel=4
        )
    return _lamina.Offload(current.session().config.activation_loading_horizon)
