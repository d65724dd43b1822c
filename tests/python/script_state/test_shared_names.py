# SPDX-License-Identifier: Apache-2.0
"""State that modules share by names, in whatever way Python has: a trace ties those that use it."""

import collections
import functools
import importlib
import itertools
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lamina.modules.tree import ModuleTree
from lamina.script_state import content as contents
from lamina.script_state.names import Names
from lamina.tracing.trace import Call, TraceOptions, trace

X = torch.randn(4, 8)
STATE = {"scale": 1.0, "width": 1.0}
CONFIG = types.SimpleNamespace(scale=1.0, width=1.0, steps=0)
NESTED = {"config": CONFIG}
TUPLE = ([1.0], "a list in a tuple")
DEEP = {"a": {"b": {"c": {"d": {"e": [1.0]}}}}}
WHOLE = np.ones(4)
VIEW = WHOLE[1:]
LEAF = torch.ones(1, requires_grad=True)
FLAG = threading.Event()
WEAK = weakref.WeakSet()
OUTSIDE = nn.Identity()
OUTSIDE.scale = 1.0


def scaled(x):
    return x * STATE["scale"]


def set_scale(value):
    STATE["scale"] = value


@functools.lru_cache
def remembered():
    return types.SimpleNamespace(scale=1.0)


remembered()


@functools.singledispatch
def dispatched(x):
    return x


@dispatched.register
def _(x: torch.Tensor):
    return x * STATE["scale"]


def counted(function):
    calls = 0

    @functools.wraps(function)
    def counting(x):
        nonlocal calls
        calls += 1
        return function(x) * calls

    return counting


@counted
def doubled(x):
    return x * 2


class Helper:
    """Reads and writes a global name in its methods."""

    def apply(self, x):
        return x * STATE["scale"]

    def put(self, value):
        STATE["scale"] = value


class Made:
    level: ClassVar = 1.0


class Straight(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * Straight.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


CYCLED = itertools.cycle([1.0, 2.0])


def yielded():
    number = 1.0
    while True:
        yield number
        number = number + 1


YIELDED = yielded()
ACT = torch.tanh


def rebind():
    global ACT
    ACT = lambda x: x * 2  # noqa: E731 -- another function


class Part(nn.Linear):
    def __init__(self, held, use):
        super().__init__(8, 8)
        self.held, self.use = held, use

    def forward(self, x):
        return self.use(self.held, super().forward(x))


class Whole(nn.Module):
    """Sets something, and two parts of it use that."""

    def __init__(self, held, use, begin):
        super().__init__()
        self.held, self.begin = held, begin
        self.first, self.second = Part(held, use), Part(held, use)

    def forward(self, x):
        self.begin(self.held)
        return self.second(self.first(x))


def names_tied(held, use, begin):
    tree = ModuleTree(Whole(held, use, begin))
    found = trace(tree, Call((X,), {}), TraceOptions())
    assert found.measures is not None
    return {tree.names[node] for tie in found.ties for node in tie.nodes}


WAYS = {
    "a method of an object": (Helper(), lambda held, x: held.apply(x), lambda held: held.put(2.0)),
    "a table of functions": ({"scaled": scaled}, lambda held, x: held["scaled"](x), lambda _: set_scale(2.0)),
    "a tuple of functions": ((scaled,), lambda held, x: held[0](x), lambda _: set_scale(2.0)),
    "a partial function": (functools.partial(scaled), lambda held, x: held(x), lambda _: set_scale(2.0)),
    "a function by its type": (None, lambda _, x: dispatched(x), lambda _: set_scale(2.0)),
    "a decorator": (None, lambda _, x: doubled(x), lambda _: None),
    "a cached object": (
        None,
        lambda _, x: x * remembered().scale,
        lambda _: setattr(remembered(), "scale", 2.0),
    ),
    "a name by its word": (None, lambda _, x: x * Made.level, lambda _: setattr(Made, "level", 2.0)),
    "an iterator": (None, lambda _, x: x * next(CYCLED), lambda _: None),
    "a generator function": (None, lambda _, x: x * next(YIELDED), lambda _: None),
    "a function's name": (None, lambda _, x: ACT(x), lambda _: rebind()),
    "an autograd function": (None, lambda _, x: Straight.apply(x), lambda _: setattr(Straight, "scale", 2.0)),
    "a tuple": (None, lambda _, x: x * TUPLE[0][0], lambda _: TUPLE[0].append(TUPLE[0].pop() + 1)),
    "depths": (
        None,
        lambda _, x: x * DEEP["a"]["b"]["c"]["d"]["e"][0],
        lambda _: DEEP["a"]["b"]["c"]["d"]["e"].append(2.0),
    ),
    "a view": (None, lambda _, x: x * VIEW[0], lambda _: WHOLE.fill(2.0)),
    "a leaf": (None, lambda _, x: x * LEAF.detach(), lambda _: LEAF.detach().fill_(2.0)),
    "an event": (None, lambda _, x: x * (2 if FLAG.is_set() else 1), lambda _: FLAG.set()),
    "weak references": (None, lambda _, x: x * len(WEAK), lambda _: WEAK.add(Made)),
    "a module outside": (None, lambda _, x: x * OUTSIDE.scale, lambda _: setattr(OUTSIDE, "scale", 2.0)),
    "a module in a list": ([OUTSIDE], lambda held, x: x * held[0].scale, lambda _: setattr(OUTSIDE, "scale", 3.0)),
    "an attribute and a name": (CONFIG, lambda held, x: x * held.scale, lambda _: setattr(CONFIG, "scale", 2.0)),
    "a name and an attribute": (CONFIG, lambda _, x: x * CONFIG.scale, lambda held: setattr(held, "scale", 2.0)),
    "a part of another": (
        None,
        lambda _, x: x * CONFIG.scale,
        lambda _: setattr(NESTED["config"], "scale", 2.0),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_that_share_a_state_are_tied_whichever_way_they_reach_it(way):
    assert names_tied(*WAYS[way]) >= {"first", "second"}


def test_a_generator_function_that_goes_on_in_a_trace_is_told(capfd):
    names_tied(*WAYS["a generator function"])
    assert "YIELDED, a generator function, has gone on in the trace" in capfd.readouterr().err


def test_a_part_that_nobody_else_uses_ties_nobody():
    steps = lambda _: setattr(CONFIG, "steps", CONFIG.steps + 1)  # noqa: E731 -- reads, and writes
    assert not names_tied(None, lambda _, x: x * CONFIG.width, steps)
    assert not names_tied(CONFIG, lambda held, x: x * held.width, lambda _: None)
    assert not names_tied(None, lambda _, x: x * STATE["width"], lambda _: STATE.update(scale=STATE["scale"] + 1))
    assert names_tied(None, lambda _, x: x * CONFIG.steps, steps)


def test_what_an_installed_library_keeps_for_itself_ties_nobody(tmp_path, monkeypatch):
    code = "SCALE = 1.0\ndef scaled(x):\n    return x * SCALE\ndef put(scale):\n    global SCALE\n    SCALE = scale\n"
    for folder, name in (("site-packages", "lamina_test_installed"), ("project", "lamina_test_of_the_script")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / folder)
        made = importlib.import_module(name)
        tied = names_tied(None, lambda _, x, scaled=made.scaled: scaled(x), lambda _, put=made.put: put(2.0))
        assert bool(tied) == (folder == "project")


def test_a_table_of_functions_alone_ties_nobody():
    table = collections.OrderedDict(tanh=torch.tanh, half=lambda x: x / 2)
    assert not names_tied(table, lambda held, x: held["half"](x), lambda _: None)


class Linked:
    """An object of a graph in which each leads to all others."""

    def __init__(self, root, parent):
        self.root, self.parent, self.children = root, parent, []


def linked(number):
    made = [Linked(None, None)]
    for at in range(1, number):
        made.append(Linked(made[0], made[at // 4]))
        made[at // 4].children.append(made[at])
    return made


GRAPH = linked(1)
ONE = TWO = GRAPH[0]


class ReadsTheGraph(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        self.linear, self.held = nn.Linear(8, 8), held

    def forward(self, x):
        one, two = (ONE, TWO) if self.held is None else (self.held, self.held.children[0])
        return self.linear(x) * (len(one.children) == len(two.root.children))


@pytest.mark.parametrize("way", ["names", "attributes"])
def test_objects_that_lead_to_each_other_are_looked_at_once_each(monkeypatch, way):
    looked = []
    items_of = contents._items
    monkeypatch.setattr(contents, "_items", lambda value: (looked.append(type(value)), items_of(value))[1])
    counts = []
    for number in (50, 200):
        graph = linked(number)
        monkeypatch.setitem(globals(), "ONE", graph[0])
        monkeypatch.setitem(globals(), "TWO", graph[1])
        looked.clear()
        held = graph[0] if way == "attributes" else None
        model = nn.Sequential(ReadsTheGraph(held), ReadsTheGraph(held))
        trace(ModuleTree(model), Call((X,), {}), TraceOptions())
        counts.append(looked.count(Linked))
    assert counts[0] > 50 and counts[1] < 5 * counts[0]


def test_metrics_that_can_be_plotted_lead_to_no_functions_of_matplotlib():
    reached = Names().functions(MulticlassAccuracy(3).plot)  # plots lead to 2,000 others
    assert {each.__module__.partition(".")[0] for each in reached}.isdisjoint({"matplotlib", "pyparsing", "cycler"})
