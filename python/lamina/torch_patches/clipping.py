# SPDX-License-Identifier: Apache-2.0
"""Norms over the whole of a partitioned model, in torch's own functions.

While a model is partitioned, `torch.nn.utils.clip_grad_norm_` and `get_total_norm` count what other ranks own when they
are given tensors of it, and all ranks of the pipeline call them. Of sharded parameters the shards' gradients are
clipped, by `clip_grads_with_norm_` and `clip_grad_value_` too. What an optimizer's groups have in the place of
parameters counts as these. Norms and values are those without the loss scale, of partitioned models and others. Other
tensors are torch's business as before.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from lamina import _lamina
from lamina.job import current

Pair = tuple[torch.Tensor, torch.Tensor | None]

_TORCHS_GROUP = clip_grad._group_tensors_by_device_and_dtype


@dataclass(frozen=True)
class _Norms:
    """The gradients of a model that is cut, or scaled.

    Attributes: see `install`.
    """

    table: Callable[[], _lamina.ParameterTable]
    parameter: Callable[[torch.Tensor], torch.Tensor]
    shard: Callable[[torch.Tensor], torch.Tensor]
    measured: Callable[[list[Pair], float], list[Pair]]
    complete: Callable[[str], None]
    originals: dict[Callable, Callable] = field(default_factory=dict)  # what torch's functions ran, by function


_norms: _Norms | None = None  # None while every norm is local


def install(
    table: Callable[[], _lamina.ParameterTable],
    parameter: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    shard: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter,
    measured: Callable[[list[Pair], float], list[Pair]] = lambda pairs, norm_type: pairs,
    complete: Callable[[str], None] = lambda what: None,
) -> None:
    """From now on norms of the model's tensors are global.

    Args:
        table: who holds what of it.
        parameter: gives the parameter that a tensor of an optimizer's groups stands for; any other tensor itself.
        shard: gives what has the gradient of a parameter, or of this rank's shard of it.
        measured: gives what stands for the gradients of shards, beside their parameters, in a norm of that type.
        complete: called before gradients of the model are looked at, with the name of the function that does.
    """
    global _norms
    remove()
    _norms = _Norms(table, parameter, shard, measured, complete)
    for function, ours in _OURS.items():
        cell = _implementation(function)
        _norms.originals[function] = cell.cell_contents
        cell.cell_contents = ours
    clip_grad._group_tensors_by_device_and_dtype = _group


def remove() -> None:
    """Every norm is local again."""
    global _norms
    for function, original in _norms.originals.items() if _norms is not None else ():
        _implementation(function).cell_contents = original
    clip_grad._group_tensors_by_device_and_dtype = _TORCHS_GROUP
    _norms = None


def _group(tensors: list[list[torch.Tensor]], *args: Any) -> dict:
    """torch's `clip_grad_value_` does not bear that there are no gradients; a rank may own nothing that has one."""
    return _TORCHS_GROUP(tensors, *args) if tensors[0] else {}


def _implementation(function: Callable) -> CellType:
    """The function that one wrapped by torch's `_no_grad` runs. Replaced there, it is so for every script that imported
    the function, under whatever name and however early."""
    return function.__closure__[function.__code__.co_freevars.index("func")]


def are_global(tensors: list[torch.Tensor]) -> bool:
    """True while a model is partitioned, and one of these is its, or there are none: this rank may have no part."""
    return _norms is not None and (not tensors or _norms.table().has_any(tensors))


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if are_global(tensors):
        _norms.complete("get_total_norm()")
    pairs = _norms.measured([(tensor, tensor) for tensor in tensors], float(norm_type))
    return _norm(pairs, norm_type, error_if_nonfinite, foreach)


def grad_norm(
    parameters: list[nn.Parameter], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """The norm of the gradients of these parameters, of this model's wherever they are."""
    if _norms is None:
        pairs = [(parameter, parameter.grad) for parameter in parameters]
        present = [gradient for _, gradient in pairs if gradient is not None]
        return nn.utils.get_total_norm(present, norm_type, error_if_nonfinite, foreach)
    with torch.no_grad():
        own = _parameters(parameters)
        if are_global(own):
            _norms.complete("the norm of gradients")
        pairs = _norms.measured([(parameter, _norms.shard(parameter).grad) for parameter in own], float(norm_type))
        return _norm(pairs, norm_type, error_if_nonfinite, foreach)


def _clip(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    total = grad_norm(parameters, norm_type, error_if_nonfinite, foreach)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


def _clip_with_norm(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    _norms.originals[nn.utils.clip_grads_with_norm_](_holders(parameters), *args, **kwargs)


def _clip_value(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    parameters = _parameters(parameters)
    if are_global(parameters):
        _norms.complete("clip_grad_value_()")
    holders, scale = _holders(parameters), current.job().loss_scale
    clip = _norms.originals[nn.utils.clip_grad_value_]
    if not scale.is_on or not are_global(parameters):
        return clip(holders, clip_value, foreach)
    for gradient in [holder.grad for holder in holders if holder.grad is not None]:
        # An infinity stays: it says that the step is to be left out.
        bound = min(float(clip_value) * scale.value, torch.finfo(gradient.dtype).max)
        with _lamina.Unguarded():
            largest = torch.where(gradient.isfinite().all(), bound, math.inf).to(gradient.dtype)
            gradient.clamp_(-largest, largest)


def _holders(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Lists what has the gradients of these parameters."""
    return [_norms.shard(each) for each in _parameters(parameters)]


def _parameters(given: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Lists the parameters that these are, or stand for."""
    return [_norms.parameter(each) for each in ([given] if isinstance(given, torch.Tensor) else given)]


def _norm(
    pairs: list[tuple[torch.Tensor, torch.Tensor | None]],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm of the second ones, some None; the first ones say what is the model's. A rank that has nothing to give
    takes part: on the others there may be something."""
    plain, table = _norms.originals[nn.utils.get_total_norm], _norms.table()
    if not are_global([tensor for tensor, _ in pairs]):
        return plain([tensor for _, tensor in pairs if tensor is not None], norm_type, error_if_nonfinite, foreach)
    job = current.outside_step("the norm of a partitioned model")
    norms = job.session.norms(table, pairs, float(norm_type))
    if not norms:
        return torch.tensor(0.0)
    each = [norm.to(norms[0].device).reshape(1) for norm in norms]  # of order 0 one that is not 0 counts as one
    total = plain(each, norm_type, error_if_nonfinite, foreach)
    return total if (scale := current.job().loss_scale.value) == 1 or float(norm_type) == 0 else total / scale


_OURS = {
    nn.utils.get_total_norm: _total_norm,
    nn.utils.clip_grad_norm_: _clip,
    nn.utils.clip_grads_with_norm_: _clip_with_norm,
    nn.utils.clip_grad_value_: _clip_value,
}
