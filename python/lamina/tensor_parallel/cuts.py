# SPDX-License-Identifier: Apache-2.0
"""The cuts of planned layers, which the engine decides (lamina/tensor_parallel/layer_cuts.h), with their modules."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.layers import Here, Slicing
from lamina.tensor_parallel.plans import Plan
from lamina.tensor_parallel.shares import Share


@dataclass(frozen=True)
class LayerCut:
    """How a layer is cut.

    Attributes:
        layer: itself, or the wrapper around it.
        style: one of the engine's.
        slices: of its parameters, by name.
        here: its knowledge of its slice.
        sizes: its attributes that say how many features it has, as they are then.
    """

    layer: nn.Module
    style: str
    slices: dict[str, Slicing]
    here: Here
    sizes: dict[str, int | None]


@dataclass(frozen=True)
class Around:
    """A module around layers that give parts, and what it has of them.

    Attributes:
        module: itself.
        members: the modules in it that give parts, with these, and that take them, with None.
        heads: this rank's; None for a module without.
        keys: this rank's heads of keys, and the number of all.
        attributes: its numbers of heads, and sizes of all heads, as they are on this rank.
    """

    module: nn.Module
    members: list[tuple[nn.Module, Share | None]]
    heads: Share | None
    keys: tuple[tuple[int, ...], int]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Cuts:
    """The cuts of a model for this rank: of its layers, by name, and of the modules around them."""

    layers: dict[str, LayerCut]
    around: list[Around]


def cuts_of(plan: Plan, degree: int, index: int, team: str) -> Cuts:
    """The cuts of a model's layers for a rank, of so many of a team.

    Errors:
        UsageError: sizes do not allow what the plan asks for.
    """
    cuts, parents = _lamina.cut_layers(plan.parents, plan.layers, plan.elsewhere, plan.tied, degree, index)
    rows = {row.name: row for row in plan.layers}
    return Cuts(
        {cut.name: _layer_cut(cut, plan, rows[cut.name], team) for cut in cuts},
        [_around(cut, plan) for cut in parents],
    )


def _layer_cut(cut: _lamina.LayerCut, plan: Plan, row: _lamina.PlannedLayer, team: str) -> LayerCut:
    chosen = None if cut.chosen is None else tuple(cut.chosen)
    here = Here(team, tuple(cut.sizes), Share(*cut.part), chosen, cut.sections, cut.by_parent, cut.padding)
    layer = plan.modules[row.member if cut.style in layers.OF_WRAPPERS else row.layer]
    return LayerCut(layer, cut.style, dict(cut.slices), here, dict(cut.numbers))


def _around(cut: _lamina.ParentCut, plan: Plan) -> Around:
    """An attribute that is an object with the number of heads is a copy, for other modules may have it, too."""
    module, rows = plan.modules[cut.parent], [*plan.layers, *plan.elsewhere]
    attributes: dict[str, Any] = {}
    for path, number in cut.numbers.items():
        name, _, below = path.partition(".")
        attributes[name] = _with_number(module.__dict__[name], below, number)
    members = [(plan.modules[rows[row].member], None if part is None else Share(*part)) for row, part in cut.members]
    heads = None if cut.heads is None else Share(*cut.heads)
    return Around(module, members, heads, (tuple(cut.own_keys), cut.keys), attributes)


def _with_number(value: Any, name: str, number: int) -> Any:
    """A copy of an object that has this number under a name; the number itself without one."""
    if not name:
        return number
    other = copy.copy(value)
    first, _, below = name.partition(".")
    setattr(other, first, _with_number(getattr(value, first), below, number))
    return other
