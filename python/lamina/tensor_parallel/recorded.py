# SPDX-License-Identifier: Apache-2.0
"""Calls of sliced layers in a run that is compared with another: what lies in slices is recorded whole."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lamina import _lamina
from lamina.tensor_parallel import layers


class _Call:
    """A call of a sliced layer, as module_call ends it; see `begin`."""

    def __init__(self, call: _lamina.HookedCall, layer: nn.Module, session: _lamina.Session):
        self._call, self._layer, self._session = call, layer, session
        self.fail = call.fail

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        self._call.end(_whole(self._layer, outputs, self._session, given=False))


def begin(
    layer: nn.Module,
    inputs: Sequence[torch.Tensor],
    session: _lamina.Session,
    begin_call: Callable[[Sequence[torch.Tensor]], _lamina.HookedCall],
) -> _Call:
    """Begins a call that hooks hear of, with whole inputs and outputs; collective over TP_GROUP, as the call is."""
    return _Call(begin_call(_whole(layer, inputs, session, given=True)), layer, session)


def _whole(
    layer: nn.Module, tensors: Sequence[torch.Tensor], session: _lamina.Session, given: bool
) -> Sequence[torch.Tensor]:
    sections = layers.slicing_of_activations(layer, given)
    if sections is None:
        return tensors
    return [_as_whole(each.detach() if given else each, sections, session) for each in tensors]


def _as_whole(part: torch.Tensor, sections: list[tuple[int, int]], session: _lamina.Session) -> torch.Tensor:
    """The whole of a part, and of its gradient, when that comes."""
    slicing = (part.dim() - 1, sections)
    whole = session.whole_of(part.detach(), slicing)
    if not part.requires_grad:
        return whole
    made = whole.requires_grad_().view_as(whole)  # a tensor that has come of the call, whose gradient hooks hear of
    part.register_hook(lambda gradient: _see_gradient(made, session.whole_of(gradient.detach(), slicing)))
    return made


def _see_gradient(made: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.autograd.grad(made, made._base, gradient)
