# SPDX-License-Identifier: Apache-2.0
"""The walk through a script's state, and changes that are made elsewhere."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lamina.script_state.changes import Changes, Snapshot, differences
from lamina.script_state.content import content as content_of
from lamina.script_state.content import is_generator
from lamina.script_state.kinds import InPlaceOfValue, is_of_a_library
from lamina.script_state.walk import Reach

pytestmark = pytest.mark.unit


class Slotted:
    __slots__ = ("last",)


class Named:
    pass


class Table(dict):
    """A dictionary of another class."""


class State:
    """Objects of all kinds that are compared in their own way."""

    def __init__(self):
        self.items, self.elements, self.table, self.slotted, self.named = (
            {"a": 1},
            [1, 2],
            Table(a=1),
            Slotted(),
            Named(),
        )
        self.array, self.draws, self.tensor = np.zeros(2), random.Random(3), torch.zeros(2)
        self.members = {"a"}


CHANGES = {
    "another item": lambda state: state.items.update(a=2),
    "another name": lambda state: state.items.update(b=state.items.pop("a")),
    "a longer list": lambda state: state.elements.append(3),
    "a larger set": lambda state: state.members.add("b"),
    "another member": lambda state: state.members.symmetric_difference_update("ab"),
    "another order": lambda state: state.elements.reverse(),
    "a table of its own": lambda state: state.table.update(a=2),
    "a slot": lambda state: setattr(state.slotted, "last", 1),
    "an attribute": lambda state: setattr(state.named, "is_new", True),
    "an array": lambda state: state.array.__setitem__(0, 1),
    "a generator": lambda state: state.draws.random(),
    "a tensor": lambda state: state.tensor.add_(1),
}


def content(state):
    named = {name: vars(state)[name] for name in ("items", "elements", "table", "members")} | vars(state.named)
    last = getattr(state.slotted, "last", None)
    return named, last, state.array.tolist(), state.tensor.tolist(), state.draws.getstate()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_made_where_the_same_was_built(change):
    here, there = State(), State()
    before, elsewhere = (Snapshot(Reach([("it", state)])) for state in (here, there))
    assert not any(before.changes(differences(before.reach), pytest.fail))
    change(here)
    changes = before.changes(differences(before.reach), pytest.fail)
    elsewhere.apply(Changes(*changes), pytest.fail)
    assert content(here) == content(there) != content(State())
    assert not any(before.changes([], pytest.fail)[0])


def test_a_change_that_both_have_made_is_refused_or_replaced():
    for replaces in (False, True):
        here, there, refused = State(), State(), []
        before, elsewhere = (Snapshot(Reach([("it", state)])) for state in (here, there))
        for state, number in ((here, 2), (there, 4)):
            state.items["a"] = number
            state.tensor.fill_(number)
            state.draws.seed(number)
        changes = before.changes(differences(before.reach), pytest.fail)
        elsewhere.apply(changes, lambda name, _: refused.append(name), replaces)  # noqa: B023
        assert (content(here) == content(there)) == replaces
        assert len(refused) == (0 if replaces else 3)


def test_descriptors_that_watch_attributes_are_no_change():
    class Watched:
        factor = 1

    before = Snapshot(Reach([("it", Watched)]))
    Watched.factor = InPlaceOfValue()
    assert not differences(before.reach)


def test_what_is_near_is_found_before_what_many_objects_are_in():
    far = [[Named() for _ in range(50)] for _ in range(50)]
    meter = Named()
    reach = Reach([("before", [far]), ("meter", {"it": meter}), ("after", [far])], most=100)
    meter.count = 1
    assert [name for name, *_ in reach.changed()] == ["meter['it']"]
    assert not reach.is_whole and Reach([("meter", meter)]).is_whole


def test_random_numbers_of_the_system_have_no_state():
    assert is_generator(draws := random.SystemRandom()) and content_of([draws]) == content_of([draws])


def test_a_walk_stands_while_only_plain_values_change():
    state = State()
    reach = Reach([("it", state)])
    state.items["a"], state.named.count = 2.0, 1
    state.elements.pop()
    assert reach.refresh() and not list(reach.changed())
    state.named.held = state.items
    assert not reach.refresh() and len(list(reach.changed())) == 1


def test_a_library_that_lies_in_a_checkout_is_none_of_the_scripts(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.made_up", SimpleNamespace(__file__="/home/transformers/made_up.py"))
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(__file__="/home/made_up.py"))
    assert is_of_a_library("transformers.made_up")
    assert not is_of_a_library("made_up")
