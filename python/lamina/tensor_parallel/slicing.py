# SPDX-License-Identifier: Apache-2.0
"""The slicing of a model, when it is wrapped: layers get this rank's slices of the values of world rank 0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.tensor_parallel import layers, plans
from lamina.tensor_parallel.layers import Slicing
from lamina.util.told import tell

# Attributes of a module around sliced layers: how many heads, and how many features, it has.
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "n_kv_heads")
_SIZES = ("split_size", "all_head_size")


def slice_model(root: nn.Module, session: _lamina.Session, make: Callable[[list[torch.Tensor]], None]) -> None:
    """Cuts the marked layers of a model over the ranks of TP_GROUP, in place; collective over the world. Nothing is
    changed unless all of them can be cut.

    Args:
        make: makes delayed values of these parameters.

    Errors:
        UsageError: a plan does not fit the model, or sizes do not divide by the degree.
    """
    degree, index = session.group_size("tp"), session.group_rank("tp")
    planned = plans.planned(root)
    _tell_of_whole(root, planned, session)
    if not planned:
        return
    _require_own_parameters(root, planned)
    cuts = {name: _cut_of(root.get_submodule(name), each, degree) for name, each in planned.items()}
    parents = list({id(each.parent): each.parent for each in planned.values() if each.style == "colwise"}.values())
    heads = [(parent, counts) for parent in parents if (counts := _divided(parent, degree))]
    rows = [
        (f"{name}.{key}", root.get_submodule(name)._parameters[key], slicing)
        for name, cut in cuts.items()
        for key, slicing in cut.items()
    ]
    session.slice(rows, make)
    team = session.team()
    for name, cut in cuts.items():
        _become(root.get_submodule(name), planned[name].style, cut, degree, team)
    for parent, counts in heads:
        own = next(iter(counts.values()))
        for attribute, count in counts.items():
            setattr(parent, attribute, count)
        layers.become_heads(parent, own, index * own, degree * own)


@contextmanager
def wholes(root: nn.Module, session: _lamina.Session, write_back: bool = False) -> Iterator[None]:
    """Inside, whole tensors are in the places of sliced parameters, without memory where these have none; collective
    over TP_GROUP.

    Args:
        write_back: whether this rank's slices of what is written to them inside count; all ranks write the same.
    """
    slicings = layers.slicings(root)
    places = [
        (module._parameters, name, parameter, slicings[id(parameter)])
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in slicings
    ]
    lent: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, Slicing]] = []
    try:
        for held, name, parameter, slicing in places:
            whole = nn.Parameter(_whole_of(parameter, slicing, session), parameter.requires_grad)
            lent.append((held, name, parameter, whole, slicing))
            held[name] = whole
        yield
        for _, _, parameter, whole, slicing in lent if write_back else ():
            if not whole.is_meta:
                with torch.no_grad():
                    parameter.copy_(session.slice_of(whole.detach(), slicing))
    finally:
        for held, name, parameter, _, _ in lent:
            held[name] = parameter


def require_unsliced(session: _lamina.Session, what: str, instead: str) -> None:
    """Refuses what is not there yet for a model with sliced layers."""
    if session.group_size("tp") > 1:
        raise UsageError(
            f"{what} is not available yet with tensor_parallel_degree above 1: {instead}", code="tp-not-yet"
        )


def whole_shape(shape: torch.Size, slicing: Slicing) -> torch.Size:
    """The shape of the whole of which a tensor of that shape is a slice."""
    dimension, sections = slicing
    return torch.Size([*shape[:dimension], sum(extent for extent, _ in sections), *shape[dimension + 1 :]])


def _whole_of(parameter: torch.Tensor, slicing: Slicing, session: _lamina.Session) -> torch.Tensor:
    if parameter.is_meta:
        return torch.empty(whole_shape(parameter.shape, slicing), dtype=parameter.dtype, device="meta")
    return session.whole_of(parameter.detach(), slicing)


# Before anything is changed.


def _tell_of_whole(root: nn.Module, planned: dict[str, plans.Planned], session: _lamina.Session) -> None:
    if session.rank != 0:
        return
    if not planned:
        tell(
            f"tensor_parallel_degree is {session.group_size('tp')}, and no layer of the model is sliced: mark modules "
            "with lamina.tensor_parallelism() or lamina.set_tensor_parallelism(), by a plan where their class is not "
            "known; every rank of a TP_GROUP computes all of it"
        )
    elif whole := plans.marked_but_whole(root, planned):
        tell(f"layers that are marked for tensor parallelism and stay whole: {', '.join(whole)}")


def _require_own_parameters(root: nn.Module, planned: dict[str, plans.Planned]) -> None:
    """Refuses parameters that another module has, too: it would find a slice."""
    holders: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for name in planned:
        for parameter in root.get_submodule(name).parameters(recurse=False):
            if len(names := holders[id(parameter)]) > 1:
                raise UsageError(
                    f"{name} cannot be sliced: {' and '.join(names)} are one parameter, which is not available yet "
                    "with tensor_parallel_degree above 1: leave one of the two out of the plan, or untie them",
                    code="tp-layer",
                )


def _cut_of(layer: nn.Module, planned: plans.Planned, degree: int) -> dict[str, Slicing]:
    """How each parameter of a layer is cut, by its name."""
    is_linear = isinstance(layer, nn.Linear)
    if not is_linear and not _is_conv1d(layer):
        raise UsageError(
            f"{planned.name} is a {type(layer).__name__}, and a plan slices torch's Linear and transformers' Conv1D "
            "alone: leave it out of the plan",
            code="tp-layer",
        )
    out, into = (0, 1) if is_linear else (1, 0)
    extent = layer.weight.shape[out if planned.style == "colwise" else into]
    sections = _sections(planned, extent, degree)
    if planned.style == "rowwise":
        return {"weight": (into, sections)}
    cut: dict[str, Slicing] = {"weight": (out, sections)}
    if layer.bias is not None:
        cut["bias"] = (0, sections)
    return cut


def _sections(planned: plans.Planned, extent: int, degree: int) -> list[tuple[int, int]]:
    """The sections of a dimension, each cut apart from the others, and the unit that is never torn."""
    parent = planned.parent
    unit = _whole_number(parent, "head_dim") or 1
    unit = unit if extent % unit == 0 else 1
    split = _whole_number(parent, "split_size") if planned.style == "colwise" else None
    count = extent // split if split and extent % split == 0 else 1
    size = extent // count
    if size // unit % degree != 0:
        parts = f"{size // unit} parts of {unit}" if unit > 1 else f"{size} features"
        raise UsageError(
            f"{planned.name} has {parts}, which tensor_parallel_degree: {degree} does not divide, and uneven slices "
            "are not available yet: take another degree, or leave the layer out of the plan",
            code="tp-layer",
        )
    return [(size, unit)] * count


def _divided(parent: nn.Module, degree: int) -> dict[str, int]:
    """The numbers of heads and sizes that a module around sliced layers has on this rank, heads first; empty where it
    has none."""
    counts = {name: count for name in _HEAD_COUNTS if (count := _whole_number(parent, name))}
    if not counts:
        return {}
    counts |= {name: size for name in _SIZES if (size := _whole_number(parent, name))}
    for name, count in counts.items():
        if count % degree:
            raise UsageError(
                f"{type(parent).__name__} has {name} = {count}, which tensor_parallel_degree: {degree} does not "
                "divide, and uneven slices are not available yet: take another degree",
                code="tp-layer",
            )
    return {name: count // degree for name, count in counts.items()}


def _whole_number(module: nn.Module, name: str) -> int | None:
    value = module.__dict__.get(name)
    return value if type(value) is int and value > 0 else None


def _is_conv1d(layer: nn.Module) -> bool:
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__)
    return any(kind in ("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D") for kind in kinds)


# Changes.


def _become(layer: nn.Module, style: str, cut: dict[str, Slicing], degree: int, team: str) -> None:
    columns = style == "colwise"
    features = ("out_features", "nf") if columns else ("in_features", "nx")
    for name in features:
        if (count := _whole_number(layer, name)) is not None:
            setattr(layer, name, count // degree)
    become = layers.become_columns if columns else layers.become_rows
    become(layer, cut, team)
