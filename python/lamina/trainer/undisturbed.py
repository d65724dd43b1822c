# SPDX-License-Identifier: Apache-2.0
"""Work beside a training that leaves no trace in it."""

import contextlib
import random
import sys
from collections.abc import Iterator

import torch
from torch import nn

from lamina.job import current


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what a training with the same bits needs: all generators, the mode of every module, and the
    buffers."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
    session = current.session()
    steps, python, generators = session.seeded_steps, random.getstate(), _numpy_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if generators is not None:
            sys.modules["numpy"].random.set_state(generators)
        if steps is not None:
            session.seeded_steps = steps
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


def _numpy_state() -> tuple | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()
