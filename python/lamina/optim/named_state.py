# SPDX-License-Identifier: Apache-2.0
"""State dicts of optimizers, by number and by name: see [Note: names of parameters] in
lamina/distributed_optimizer/groups.h."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lamina.errors import UsageError, refusal, said
from lamina.job import current
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY

# The parameters of the whole optimizer by group, each with its name in the model and the name that a script gave it in
# the group.
Layout = list[list[tuple[str, str | None]]]
Known = list[list[tuple[str, str | None, bool]]]  # the same as one rank knows it, and what of it is here

_MEMBERS = ("params", "param_names")
PARTS = "_lamina_parts"  # (group, part, parts) of each parameter's states, where a partial state has no more
SCALE = "loss_scale"
MASTERS = "masters"  # of parameters, beside their states: the plain optimizer then knows all of these


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def without_marks(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without what marks it as partial."""
    return {key: value for key, value in state_dict.items() if key not in (PARTIAL, SAVED_BY, PARTS)}


def agreed(everyone: Sequence[Known]) -> Layout:
    """The groups of the whole optimizer from what each rank of a pipeline knows of them."""
    for other in everyone:
        if len(other) != len(everyone[0]):
            raise refusal("groups-apart", len(everyone[0]), len(other))
    # A parameter that no rank has any more was taken out of the groups.
    held = {(place, name) for known in everyone for place, group in enumerate(known) for name, _, here in group if here}
    layouts = [
        [[(name, given) for name, given, _ in group if (place, name) in held] for place, group in enumerate(known)]
        for known in everyone
    ]
    if all(other == layouts[0] for other in layouts):
        return layouts[0]
    order = {name: place for place, (name, _) in enumerate(current.job().model.named_parameters())}
    merged = [dict(itertools.chain.from_iterable(group)) for group in zip(*layouts, strict=True)]
    return [sorted(group.items(), key=lambda item: order.get(item[0], len(order))) for group in merged]


def by_name(state_dict: Mapping[str, Any], names: Iterable[Iterable[str]]) -> dict[str, Any]:
    """A state by name from one by number; `names` are those of each group's parameters."""
    named, groups = {}, []
    for group, own in zip(state_dict["param_groups"], names, strict=True):
        own = list(own)
        named |= dict(zip(group["params"], own, strict=True))
        groups.append({**group, "params": own})
    return without_marks(state_dict) | {"param_groups": groups} | _with_keys(state_dict, named)


def by_number(named: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The state of the whole optimizer by number from one by name."""
    numbers = {name: number for number, (name, _) in enumerate(itertools.chain.from_iterable(layout))}
    groups = [
        _with_members(group, [numbers[name] for name, _ in members], [given for _, given in members])
        for group, members in zip(named["param_groups"], layout, strict=True)
    ]
    return {**named, "param_groups": groups} | _with_keys(named, numbers)


def of_parameters(named: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns of a state by name what these parameters have."""
    return {name: dict(named["state"][name]) for name in names if name in named["state"]}


def own_part(
    named: Mapping[str, Any], own: Layout, parts: Sequence[dict[str, Any] | None], names: set[str]
) -> dict[str, Any]:
    """Returns what torch's optimizer loads on a rank that has the parameters `own`, whose states are `parts`, in their
    order: by number. `names` are those of all parameters."""
    state = {key: value for key, value in named["state"].items() if key not in names}
    state |= {number: part for number, part in enumerate(parts) if part}
    groups, numbers = [], itertools.count()
    for group, members in zip(named["param_groups"], own, strict=True):
        groups.append(_with_members(group, [next(numbers) for _ in members], [given for _, given in members]))
    rest = {key: value for key, value in without_marks(named).items() if key not in (MASTERS, SCALE)}
    return {**rest, "state": state, "param_groups": groups}


def check_count(state_dict: Mapping[str, Any], count: int) -> str:
    """Says what is wrong with the number of groups, "" if nothing."""
    saved = len(state_dict["param_groups"])
    return "" if saved == count else said("other-groups", saved, count)


def check_lengths(state_dict: Mapping[str, Any], layout: Layout) -> str:
    """Says what keeps a full state from fitting, "" if nothing."""
    if problem := check_count(state_dict, len(layout)):
        return problem
    for number, (group, members) in enumerate(zip(state_dict["param_groups"], layout, strict=True)):
        if len(group["params"]) != len(members):
            return said("other-members", number, len(group["params"]), len(members))
    return ""


def check_names(everyone: Sequence[Sequence[Sequence[str]]], layout: Layout, home: Callable[[str], str]) -> None:
    """Checks that the partial states of all ranks, with groups of these names, together have the parameters of
    `layout`; UsageError where they do not. `home` says where a parameter lives."""
    for number, members in enumerate(layout):
        expected = {name for name, _ in members}
        found = set(itertools.chain.from_iterable(groups[number] for groups in everyone))
        for name in (name for name, _ in members if name not in found):
            raise UsageError(
                f"the partial state dicts lack {name}, which is in group {number} and lives on {home(name)}",
                code="state-other-optimizer",
            )
        for name in sorted(found - expected):
            raise UsageError(
                f"the partial state dicts have {name} in group {number}, where the optimizer has it not",
                code="state-other-optimizer",
            )


def _with_keys(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Its states and masters with other keys for those of parameters, which come first, in the order of `keys`."""

    def changed(held: Mapping[Any, Any]) -> dict[Any, Any]:
        others = {key: value for key, value in held.items() if key not in keys}
        return {keys[key]: held[key] for key in keys if key in held} | others

    return {kind: changed(state_dict[kind]) for kind in ("state", MASTERS) if kind in state_dict}


def _with_members(group: Mapping[str, Any], numbers: list[int], given: list[str | None]) -> dict[str, Any]:
    named = {"param_names": given} if "param_names" in group else {}
    return {**group, **named, "params": numbers}
