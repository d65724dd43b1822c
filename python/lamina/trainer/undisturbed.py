# SPDX-License-Identifier: Apache-2.0
"""Saves and restores all state that affects the training's bits (generators, modes, buffers) around an evaluation or a
retried step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank
from lamina.script_state import generators
from lamina.trainer.job import take_loaded


class Kept:
    """All generators, those that `readers` hold too, the mode of every module, the buffers and the number of
    microbatches, as they are now."""

    def __init__(self, model: nn.Module, *readers: Any):
        take_loaded()
        self._model, self._was_cut = model, model.partitioned
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = {place: (buffer, buffer.clone()) for place, buffer in _buffers(model).items()}
        self._session = current.session()
        self._microbatches = self._session.all_microbatches
        self._steps, self._readers, self._generators = self._session.seeded_steps, readers, generators.states(*readers)

    def put_back(self, alone: bool = False) -> None:
        """Makes all of it what it was; every rank calls it. One that does so alone leaves buffers that were moved."""
        generators.put_states(self._generators, *self._readers)
        self._session.all_microbatches = self._microbatches
        if self._steps is not None:
            self._session.seeded_steps = self._steps
        for module, mode in self._modes:
            module.training = mode
        if not alone or self._was_cut == self._model.partitioned:
            self._put_buffers_back()

    @torch.no_grad()
    def _put_buffers_back(self) -> None:
        values = {place: before for place, (_, before) in self._buffers.items()}
        if self._model.partitioned and not self._was_cut:  # with the values of rank 0
            values = allgather(values if rank() == 0 else None, WORLD)[0]
            self._buffers = {place: (now, now) for place, now in _buffers(self._model).items()}
        modules = dict(self._model.named_modules())
        for (module, name), (buffer, _) in self._buffers.items():
            modules[module]._buffers[name] = buffer  # a forward may have put another one there
            _put_back(buffer, values[module, name])


def _put_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the value, without a new version: a backward to come may read it. Nobody wrote to elements that share
    memory."""
    if buffer.layout is not torch.strided or torch._debug_has_internal_overlap(buffer) != 1:
        with torch.autograd._unsafe_preserve_version_counter(buffer):
            buffer.copy_(value)


@contextlib.contextmanager
def undisturbed(model: nn.Module, *readers: Any) -> Iterator[None]:
    """Puts all of it back afterwards."""
    kept = Kept(model, *readers)
    try:
        yield
    except BaseException:
        kept.put_back(alone=True)
        raise
    kept.put_back()


def _buffers(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The buffers that are on this rank, by the names of their module and their own."""
    here = set(map(id, model.local_buffers() if model.partitioned else model.buffers()))
    named = model.named_modules()
    every = {(path, name): buffer for path, module in named for name, buffer in module._buffers.items()}
    return {place: buffer for place, buffer in every.items() if id(buffer) in here}
