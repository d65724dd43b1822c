# SPDX-License-Identifier: Apache-2.0
"""State dicts of optimizers as the engine's rows, and back: see lamina/distributed_optimizer/state_dicts.h. A whole one
goes by numbers as torch's do, a partial one by names."""

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from lamina.model.partitioned import unpacked
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY, is_partial, saved_by

_MEMBERS = ("params", "param_names")
_PARTS = "_lamina_parts"  # (group, part, parts) of each parameter's states, where a partial state has no more
_MASTERS = "masters"  # of parameters, beside their states: the plain optimizer then knows all of these
SCALE = "loss_scale"

Row = tuple[str, dict[str, Any] | None, torch.Tensor | None]  # name, state, master
Rows = tuple[list[list[Row]], bool, tuple[int, ...], tuple[str, int, int] | None, Any]


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def without_marks(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without what marks it as partial."""
    return {key: value for key, value in state_dict.items() if key not in (PARTIAL, SAVED_BY, _PARTS)}


def rows_of(state_dict: Mapping[str, Any]) -> Rows:
    """A state dict that is to be loaded."""
    partial, states, masters = is_partial(state_dict), state_dict["state"], state_dict.get(_MASTERS, {})
    groups = [
        [
            (str(key) if partial else "", dict(states[key]) if key in states else None, masters.get(key))
            for key in group.get("params", ())
        ]
        for group in state_dict["param_groups"]
    ]
    return groups, partial, saved_by(state_dict) or (), state_dict.get(_PARTS), state_dict.get(SCALE)


def dictionary(torchs: Mapping[str, Any], written: Any) -> dict[str, Any]:
    """The state dict of the engine's rows, with what else torch's has: options of groups, states of no parameter."""
    rows, partial, place, parts, scale = written
    number = itertools.count()
    keyed = [[(name if partial else next(number), *row) for name, *row in group] for group in rows]
    every = sorted(itertools.chain(*keyed), key=itemgetter(0))
    states = {key: _unpacked(state) for key, _, state, _ in every if state is not None}
    masters = {key: master for key, _, _, master in every if master is not None}
    groups = [
        _with_members(group, [key for key, *_ in members], [given or None for _, given, *_ in members])
        for group, members in zip(torchs["param_groups"], keyed, strict=True)
    ]
    made = {**torchs, "state": states_of_none(torchs) | states, "param_groups": groups}
    made |= {_MASTERS: masters} if masters else {}
    made |= {SCALE: scale} if scale is not None else {}
    marks = {PARTIAL: True, SAVED_BY: place} if partial else {}
    return made | marks | ({_PARTS: parts} if parts is not None else {})


def for_torch(
    state_dict: Mapping[str, Any], own: Sequence[Mapping[str, Any]], parts: Sequence[dict[str, Any] | None]
) -> dict[str, Any]:
    """Returns what torch's optimizer loads of a state dict.

    Args:
        own: its groups.
        parts: the state of each of their parameters.
    """
    states = states_of_none(state_dict) | {number: _unpacked(part) for number, part in enumerate(parts) if part}
    groups, number = [], itertools.count()
    for saved, group in zip(state_dict["param_groups"], own, strict=True):
        names = list(group.get("param_names", [""] * len(group["params"])))
        groups.append(_with_members(saved, [next(number) for _ in group["params"]], names))
    rest = {key: value for key, value in without_marks(state_dict).items() if key not in (_MASTERS, SCALE)}
    return {**rest, "state": states, "param_groups": groups}


def states_of_none(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """The states of no parameter."""
    keys = {key for group in state_dict["param_groups"] for key in group["params"]}
    return {key: value for key, value in state_dict["state"].items() if key not in keys}


def _with_members(group: Mapping[str, Any], keys: list[Any], given: list[str | None]) -> dict[str, Any]:
    named = {"param_names": given} if "param_names" in group else {}
    return {**group, **named, "params": keys}


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: unpacked(field) for key, field in state.items()}
