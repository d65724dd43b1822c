# SPDX-License-Identifier: Apache-2.0
"""How functions of a script use names and attributes, as their source says."""

import sys

import pytest

from lamina.script_state.uses import updates_here, uses

KEPT = {}


class Net:
    # fmt: off
    def assigns(self, x): self.state = x
    def counts(self, x): self.state += x
    def averages(self, x): self.state = 0.9 * self.state + x
    def resets(self, x): self.state = None if self.other is None else x
    def reads(self, x): return x * self.state
    def sets_a_part(self, x): self.state.scale = x
    def sets_an_item(self, x): self.state["scale"] = x
    def sets_some_item(self, x): self.state[x] = x
    def counts_in_an_item(self, x): self.state["scale"] = self.state["scale"] + x
    def appends(self, x): self.state.append(x)
    def writes_in_place(self, x): self.state.mul_(0.9).add_(x)
    def hands_on(self, x): x(self.state)
    def measures(self, x): return len(self.state)
    # fmt: on


@pytest.mark.parametrize(
    "function, part, reads, writes, certain",
    [
        ("assigns", None, False, True, True),
        ("counts", None, True, True, True),
        ("averages", None, True, True, True),
        ("resets", None, False, True, True),
        ("reads", None, True, False, True),
        ("sets_a_part", "scale", False, True, True),
        ("sets_an_item", "scale", False, True, True),
        ("sets_some_item", ..., False, True, True),
        ("counts_in_an_item", "scale", True, True, True),
        ("appends", None, True, True, True),
        ("writes_in_place", None, True, True, True),
        ("hands_on", None, True, True, False),
        ("measures", None, True, False, True),
    ],
)
def test_each_way_to_use_an_attribute(function, part, reads, writes, certain):
    found = {use for use in uses(getattr(Net, function).__code__) if use.name == "state"}
    assert {(use.part, use.reads, use.writes, use.certain) for use in found} == {(part, reads, writes, certain)}


def test_two_lambdas_in_a_line_are_told_apart():
    first, second = (lambda: KEPT["x"]), (lambda: KEPT.clear())
    if sys.version_info >= (3, 11):
        assert [{use.writes for use in uses(each.__code__) if use.name == "KEPT"} for each in (first, second)] == [
            {False},
            {True},
        ]
    else:
        assert uses(first.__code__) is uses(second.__code__) is None


def test_a_function_without_source_is_not_known():
    space = {}
    exec("def f(): return KEPT", space)
    assert uses(space["f"].__code__) is None


class Told:
    def __init__(self):
        self.value, self.updates = 0, []

    @property
    def state(self):
        self.updates.append(updates_here(sys._getframe(1), "state"))
        return self.value

    @state.setter
    def state(self, value):
        self.updates.append(updates_here(sys._getframe(1), "state"))
        self.value = value


def test_a_frame_that_updates_is_known_at_both_halves():
    told = Told()
    told.state += 1
    told.state = (
        told.state
        + 1
    )  # fmt: skip
    assert told.updates == [True] * 4
    told.updates.clear()
    told.state = 1
    assert told.state + 1 == 2
    assert told.updates == [False] * 2
