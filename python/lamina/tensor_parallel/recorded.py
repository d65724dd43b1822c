# SPDX-License-Identifier: Apache-2.0
"""Calls of sliced layers in a run that is compared with another: what lies in slices is recorded whole."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lamina import _lamina
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.registry import DistributedModule


class _Call:
    """A call of a sliced layer, as module_call ends it; see `begin`."""

    def __init__(self, call: _lamina.HookedCall, shown: _lamina.HookedCall, layer: nn.Module, session: _lamina.Session):
        self._call, self._shown, self._layer, self._session = call, shown, layer, session

    def fail(self) -> None:
        self._shown.fail()
        self._call.fail()

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        self._shown.end(_whole(self._layer, outputs, self._session, given=False))
        self._call.end(outputs)


def begin(
    layer: nn.Module,
    inputs: Sequence[torch.Tensor],
    session: _lamina.Session,
    begin_call: Callable[[Sequence[torch.Tensor], bool], _lamina.HookedCall],
) -> _Call:
    """Begins a call that hooks hear of, those that are shown tensors with whole inputs and outputs; collective over
    TP_GROUP, as the call is. The others follow the backward of what the layer itself gives."""
    call = begin_call((), False)
    return _Call(call, begin_call(_whole(layer, inputs, session, given=True), True), layer, session)


def knows(module: nn.Module) -> bool:
    """True for a module that gives something else than with one rank."""
    is_other = (
        type(module).as_plain is not DistributedModule.as_plain if isinstance(module, DistributedModule) else False
    )
    return is_other or layers.is_sliced(module)


def _whole(
    layer: nn.Module, tensors: Sequence[torch.Tensor], session: _lamina.Session, given: bool
) -> Sequence[torch.Tensor]:
    if isinstance(layer, DistributedModule) and not layers.is_sliced(layer):
        return tensors if given else [_seen(each, layer.as_plain, layer.as_plain) for each in tensors]
    sections = layers.slicing_of_activations(layer, given)
    if sections is not None:
        gather = lambda part: session.whole_of(part, (part.dim() - 1, sections))  # noqa: E731
        return [_seen(each.detach() if given else each, gather, gather) for each in tensors]
    if given or (chosen := layers.chosen_outputs(layer)) is None:
        return tensors
    return [
        _seen(each, lambda part: _sum(part, *chosen) / _times(part, *chosen), lambda part: _sum(part, *chosen))
        for each in tensors
    ]


def _seen(
    part: torch.Tensor,
    whole_of: Callable[[torch.Tensor], torch.Tensor],
    gradient_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The whole of a part, and of its gradient, when that comes."""
    whole = whole_of(part.detach())
    if not part.requires_grad:
        return whole
    made = whole.requires_grad_().view_as(whole)  # a tensor that has come of the call, whose gradient hooks hear of

    def see_gradient(gradient: torch.Tensor) -> None:
        torch.autograd.grad(made, whole, gradient_of(gradient.detach()))

    part.register_hook(see_gradient)
    return made


@torch.no_grad()
def _sum(part: torch.Tensor, chosen: list[int], extent: int, team: str) -> torch.Tensor:
    """Adds up what ranks have of outputs of which some may be on several."""
    places = torch.tensor(chosen, device=part.device)
    whole = part.new_zeros(*part.shape[:-1], extent).index_add(part.dim() - 1, places, part)
    return torch.ops.lamina.tp_all_reduce(whole, team)


def _times(part: torch.Tensor, chosen: list[int], extent: int, team: str) -> torch.Tensor:
    """How many ranks have each output."""
    return _sum(part.new_ones(len(chosen)), chosen, extent, team)
