# SPDX-License-Identifier: Apache-2.0
"""State dicts of optimizers, by number and by name: see [Note: names of parameters]."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lamina.errors import UsageError
from lamina.optim.param_groups import Layout
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY

_MEMBERS = ("params", "param_names")
PARTS = "_lamina_parts"  # (group, part, parts) of each parameter's states, where a partial state has no more
_REST = "."  # the beginning of no parameter's name


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def without_marks(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without what marks it as partial."""
    return {key: value for key, value in state_dict.items() if key not in (PARTIAL, SAVED_BY, PARTS)}


def by_name(state_dict: Mapping[str, Any], names: Iterable[Iterable[str]]) -> dict[str, Any]:
    """A state by name from one by number; `names` are those of each group's parameters."""
    named, groups = {}, []
    for group, own in zip(state_dict["param_groups"], names, strict=True):
        own = list(own)
        named |= dict(zip(group["params"], own, strict=True))
        groups.append({**group, "params": own})
    state = {named.get(key, key): value for key, value in state_dict["state"].items()}
    return without_marks(state_dict) | {"state": state, "param_groups": groups}


def in_parts(named: Mapping[str, Any], partition: int) -> dict[str, Any]:
    """A rank's state by name as the engine gathers it: the state of each parameter under its name, and all the rest
    under one that no parameter can have."""
    names = set(itertools.chain.from_iterable(group["params"] for group in named["param_groups"]))
    others = {key: value for key, value in named["state"].items() if key not in names}
    own = {name: value for name, value in named["state"].items() if name in names}
    return own | {f"{_REST}{partition}": {**named, "state": others}}


def _out_of_parts(parts: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Mapping[str, Any]]]:
    """The state that the parts of all ranks make, and the rest of each rank's."""
    rests = [part for name, part in parts.items() if name.startswith(_REST)]
    state = {name: part for name, part in parts.items() if not name.startswith(_REST)}
    for rest in rests:
        state |= rest["state"]
    return state, rests


def by_number(parts: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The state of the whole optimizer by number from the parts of all ranks."""
    state, rests = _out_of_parts(parts)
    numbers = {name: number for number, (name, _) in enumerate(itertools.chain.from_iterable(layout))}
    groups = []
    for group, members in zip(rests[0]["param_groups"], layout, strict=True):
        groups.append(_with_members(group, [numbers[name] for name, _ in members], [given for _, given in members]))
    own = {number: state[name] for name, number in numbers.items() if name in state}
    others = {key: value for key, value in state.items() if key not in numbers}
    return {**rests[0], "state": own | others, "param_groups": groups}


def own_part(named: Mapping[str, Any], own: Sequence[Sequence[str]], layout: Layout) -> dict[str, Any]:
    """Returns what torch's optimizer loads on a rank that has the parameters `own`: its part of a state by name, by
    number."""
    given = dict(itertools.chain.from_iterable(layout))
    state = {key: value for key, value in named["state"].items() if key not in given}
    groups, numbers = [], itertools.count()
    for group, names in zip(named["param_groups"], own, strict=True):
        places = dict(zip(names, numbers, strict=False))
        state |= {place: named["state"][name] for name, place in places.items() if name in named["state"]}
        groups.append(_with_members(group, list(places.values()), [given[name] for name in names]))
    return {**named, "state": state, "param_groups": groups}


def merged(parts: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The partial states of all ranks as one, from their parts; the options are this rank's own."""
    state, rests = _out_of_parts(parts)
    groups = []
    for number, group in enumerate(own["param_groups"]):
        names = itertools.chain.from_iterable(rest["param_groups"][number]["params"] for rest in rests)
        groups.append({**group, "params": list(dict.fromkeys(names))})
    return {**own, "state": state, "param_groups": groups}


def check_count(state_dict: Mapping[str, Any], count: int) -> str:
    """Says what is wrong with the number of groups, "" if nothing."""
    saved = len(state_dict["param_groups"])
    return "" if saved == count else f"the state dict has {saved} parameter groups, the optimizer {count}"


def check_lengths(state_dict: Mapping[str, Any], layout: Layout) -> str:
    """Says what keeps a full state from fitting, "" if nothing."""
    if problem := check_count(state_dict, len(layout)):
        return problem
    for number, (group, members) in enumerate(zip(state_dict["param_groups"], layout, strict=True)):
        if len(group["params"]) != len(members):
            return (
                f"group {number} has {len(group['params'])} parameters in the state dict and {len(members)} in the "
                f"optimizer ({', '.join(name for name, _ in members[:3])}, ...)"
            )
    return ""


def check_names(named: Mapping[str, Any], layout: Layout, home: Callable[[str], str]) -> None:
    """UsageError unless a state by name is of the parameters in `layout`; `home` says where one lives."""
    for number, (group, members) in enumerate(zip(named["param_groups"], layout, strict=True)):
        expected, found = {name for name, _ in members}, set(group["params"])
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


def _with_members(group: Mapping[str, Any], numbers: list[int], given: list[str | None]) -> dict[str, Any]:
    named = {"param_names": given} if "param_names" in group else {}
    return {**group, **named, "params": numbers}
