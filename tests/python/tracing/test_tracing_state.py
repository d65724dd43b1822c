# SPDX-License-Identifier: Apache-2.0
"""Which modules a trace ties because they share attributes, or what is in them."""

import argparse
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from lamina.modules.tree import ModuleTree
from lamina.script_state.content import changed, changed_by_more_than_counting, content, put_numbers
from lamina.tracing.trace import Call, TraceOptions, trace

X = torch.randn(4, 8)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(()))
        self.kept, self.cache, self.same, self.calls, self.own = None, {}, 1, 0, None

    def forward(self, x):
        self.kept = x
        self.cache["x"] = x
        self.same = 1
        self.calls += 1
        self.own = self.linear(x)
        return self.own


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


class Outer(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.middle, self.other = Middle(), nn.Linear(8, 8)
        self.use = use

    def forward(self, x):
        return self.use(self.middle.inner, self.other(self.middle(x)))


def sets_a_buffer(inner, x):
    inner.mean = x.mean()
    return x


def ties(model):
    tree = ModuleTree(model)
    return tree, trace(tree, Call((X,), {}), TraceOptions())


@pytest.mark.parametrize(
    "use, attribute",
    [
        (lambda inner, x: x + inner.kept, "kept"),
        (lambda inner, x: x + inner.cache["x"], "cache"),
        (lambda inner, x: x * inner.calls, "calls"),
        (lambda inner, x: setattr(inner, "own", x) or x, "own"),
        (sets_a_buffer, "mean"),
        (lambda inner, x: x * inner.same + inner.linear.in_features, None),
        (lambda inner, x: x, None),
    ],
    ids=["an attribute", "a dictionary", "a counter", "set by both", "a buffer", "what stays the same", "nothing"],
)
def test_what_two_modules_use_and_one_sets_ties_them_and_what_is_between(use, attribute):
    tree, found = ties(Outer(use))
    assert found.measures is not None
    names = {tie.attribute: {tree.names[node] for node in tie.nodes} for tie in found.ties}
    assert names == ({f"middle.inner.{attribute}": {"", "middle", "middle.inner"}} if attribute else {})
    rows, _ = tree.filled().rows(found.measures)
    together = {rows[other]["name"] for row in rows if row["name"] == "middle" for other in row["together"]}
    assert together == ({"", "middle.inner"} if attribute else set())


def test_what_is_set_is_known_by_its_module_and_one_that_uses_it():
    tree, found = ties(Outer(lambda inner, x: x))
    inner = tree.names.index("middle.inner")
    place = [name for name, _ in tree.root.named_modules()].index("middle.inner")
    assert sorted(found.writes.attributes) == [(place, name, inner) for name in ("cache", "calls", "kept", "own")]


def test_one_object_under_two_names_is_one():
    model = Outer(lambda inner, x: x + model.found["x"])
    model.found = model.middle.inner.cache
    tree, found = ties(model)
    assert {tie.attribute for tie in found.ties} == {"found", "middle.inner.cache"}
    assert {tree.names[node] for node in found.ties[0].nodes} == {"", "middle", "middle.inner"}
    assert model.found == {}, "a trace leaves nothing behind"


class Means(nn.Module):
    """Updates a buffer, around calls of children."""

    def __init__(self, update):
        super().__init__()
        self.before, self.inside, self.update = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), update
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        return self.update(self, self.before(x))


def with_a_result(means, x):
    means.mean = 0.9 * means.mean + means.inside(x).mean(0)
    return x


def after_a_result(means, x):
    y = means.inside(x)
    means.mean.mul_(0.9).add_(y.detach().mean(0))
    return y


def with_a_number(means, x):
    y = means.inside(x)
    means.mean += 1
    return y


@pytest.mark.parametrize(
    "update, tied, late",
    [
        (with_a_result, {"means", "means.inside", "means.inside.0"}, []),
        (after_a_result, set(), ["means"]),
        (with_a_number, set(), []),
    ],
)
def test_a_call_between_the_halves_of_an_update_ties_and_one_before_it_is_waited_for(update, tied, late):
    model = nn.Sequential()
    model.means = Means(update)
    tree, found = ties(model)
    assert {tree.names[node] for tie in found.ties for node in tie.nodes} == tied
    assert [tree.names[node] for node in found.writes.late] == late
    assert "means" in {tree.names[node] for node in found.writes.nodes}


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1


class Marked(list):
    def __init__(self):
        super().__init__()
        self.mark = 1


@pytest.mark.parametrize(
    "made, change",
    [
        (Marked, lambda marked: setattr(marked, "mark", 2)),
        (Slots, lambda slots: setattr(slots, "scale", 2)),
        (lambda: np.ones(3), lambda array: array.fill(2)),
        (lambda: {"x": torch.ones(1)}, lambda held: held["x"].fill_(2)),
        (lambda: bytearray(b"x"), lambda held: held.append(1)),
        (torch.Generator, lambda generator: torch.rand(1, generator=generator)),
        (random.Random, lambda generator: generator.random()),
        (np.random.default_rng, lambda generator: generator.random()),
        (np.random.RandomState, lambda generator: generator.rand()),
        (itertools.count, next),
        (lambda: argparse.Namespace(x=1), lambda space: setattr(space, "x", 2)),
    ],
)
def test_changes_are_seen_of_what_is_no_container(made, change):
    held = made()
    before = content(held)
    assert content(held) == before
    change(held)
    assert changed(before, content(held))


def test_numbers_are_put_back_wherever_they_were():
    held = {"x": 1, "list": [1, 2], "slots": Slots(), "space": argparse.Namespace(y=1.5), "word": "a"}
    before = content(held)
    held["x"], held["list"][1], held["slots"].scale, held["space"].y, held["word"] = 2, 3, 4, 5, "b"
    numbers = {key: was for key, was in before.items() if isinstance(was, tuple) and isinstance(was[0], type)}
    put_numbers(held, numbers)
    assert (held["x"], held["list"], held["slots"].scale, held["space"].y, held["word"]) == (1, [1, 2], 1, 1.5, "b")


class Thing:
    def __init__(self):
        self.count, self.value, self.parts = 0, torch.ones(1), [1]


@pytest.mark.parametrize(
    "change, is_change, more_than_counting",
    [
        (lambda thing: None, False, False),
        (lambda thing: setattr(thing, "count", 1), True, False),
        (lambda thing: setattr(thing, "value", torch.ones(1)), True, True),
        (lambda thing: setattr(thing, "new", 1), False, False),
        (lambda thing: delattr(thing, "count"), True, True),
        (lambda thing: thing.parts.append(2), True, True),
        (lambda thing: thing.parts.clear(), True, True),
    ],
    ids=["nothing", "a number", "a tensor", "something new", "less", "a longer list", "an empty list"],
)
def test_changes_of_an_object(change, is_change, more_than_counting):
    thing = Thing()
    before = content(thing)
    change(thing)
    assert changed(before, content(thing)) == is_change
    assert changed_by_more_than_counting(before, content(thing)) == more_than_counting


class PastSetattr(nn.Linear):
    def forward(self, x):
        self.__dict__["aux"] = x.mean()
        return super().forward(x)


class ReadsIt(nn.Sequential):
    def __init__(self, read):
        super().__init__(nn.Linear(8, 8), PastSetattr(8, 8))
        self.read = read

    def forward(self, x):
        return super().forward(x) + self.read(self[1])


@pytest.mark.parametrize(
    "read", [lambda part: part.aux, lambda part: part.__dict__["aux"], lambda part: vars(part)["aux"]]
)
def test_what_is_set_in_the_dictionary_of_a_module_ties(read):
    found = trace(ModuleTree(ReadsIt(read)), Call((X,), {}), TraceOptions())
    assert [(tie.attribute, sorted(tie.nodes)) for tie in found.ties] == [("1.aux", [0, 2])]


class Reversed(torch.autograd.Function):
    """Keeps nothing for its backward, which asks its module."""

    @staticmethod
    def forward(ctx, x, modules):
        ctx.modules = modules
        return modules[0](x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.modules[0].reversed(gradient), None


class Called(Reversed):
    """Its backward does no more than call the module."""

    @staticmethod
    def backward(ctx, gradient):
        return ctx.modules[0](gradient), None


class Reversible(nn.Linear):
    def reversed(self, gradient):
        return gradient @ self.weight


@pytest.mark.parametrize("function, tied", [(Reversed, {"inner"}), (Called, set())])
def test_modules_that_a_functions_backward_uses_are_with_who_applies_it(function, tied):
    class Applies(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.other = Reversible(8, 8), Reversible(8, 8)

        def forward(self, x):
            return self.other(function.apply(x, nn.ModuleList([self.inner])))

    tree, found = ties(Applies())
    assert {tree.names[node] for tie in found.ties for node in tie.nodes} == (tied and tied | {""})
    assert not found.writes.attributes


def test_a_sparse_buffer_does_not_end_a_trace():
    model = Outer(lambda inner, x: x + inner.kept)
    model.register_buffer("heads", torch.ones(2, 2).to_sparse(), persistent=False)
    _, found = ties(model)
    assert found.measures is not None and not found.notes and found.ties
