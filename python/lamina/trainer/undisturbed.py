# SPDX-License-Identifier: Apache-2.0
"""Work beside a training that leaves no trace in it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lamina.job import current
from lamina.trainer.generators import generators, set_generators


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what a training with the same bits needs: all generators, the mode of every module, and the
    buffers."""
    modes = [(module, module.training) for module in model.modules()]
    here = set(map(id, _buffers(model)))
    places = [(module._buffers, *item) for module in model.modules() for item in module._buffers.items()]
    buffers = [(*place, place[-1].clone(), place[-1]._version) for place in places if id(place[-1]) in here]
    session = current.session()
    steps, states = session.seeded_steps, generators()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        set_generators(states)
        if steps is not None:
            session.seeded_steps = steps
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for of_module, name, buffer, before, version in buffers:
                of_module[name] = buffer  # a forward may have put another one there
                if buffer._version != version:
                    buffer.copy_(before)


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    """Lists those that are on this rank."""
    return list(model.local_buffers() if model.partitioned else model.buffers())
