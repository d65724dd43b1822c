# SPDX-License-Identifier: Apache-2.0
"""Calls of modules that other ranks own."""

import pytest
import torch
from torch import nn

from lamina.torch_patches import module_call

ORIGINAL = nn.Module.__call__


@pytest.fixture(autouse=True)
def removed():
    yield
    module_call.remove()
    assert nn.Module.__call__ is ORIGINAL


def test_only_modules_that_are_listed_are_routed():
    here, there = nn.Linear(2, 2), nn.Linear(2, 2)
    calls = []
    module_call.install({id(there): 7}, lambda number, args, kwargs: calls.append((number, args, kwargs)))
    x = torch.ones(2)
    assert torch.equal(here(x), nn.functional.linear(x, here.weight, here.bias))
    there(x, flag=1)
    assert calls == [(7, (x,), {"flag": 1})]


def test_routed_modules_are_reached_below_local_ones():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module_call.install({id(model[1]): 1}, lambda number, args, kwargs: "routed")
    assert model(torch.ones(2)) == "routed"


def test_installing_again_replaces_the_list():
    first, second = nn.Identity(), nn.Identity()
    module_call.install({id(first): 0}, lambda *call: "routed")
    module_call.install({id(second): 0}, lambda *call: "routed")
    assert first(1) == 1 and second(1) == "routed"


class Routes:
    def __init__(self):
        self.calls = 0

    def route(self, number, args, kwargs):
        self.calls += 1


def test_a_route_is_forgotten_unless_another_was_installed_since():
    module, first, second = nn.Identity(), Routes(), Routes()
    module_call.install({id(module): 0}, first.route)
    module_call.install({id(module): 0}, second.route)
    module_call.forget(first.route)
    module(1)
    module_call.forget(second.route)
    assert module(1) == 1 and (first.calls, second.calls) == (0, 1)
    assert nn.Module.__call__ is ORIGINAL


def test_what_somebody_puts_around_calls_is_called_once(monkeypatch):
    here, there, seen = nn.Identity(), nn.Identity(), []
    module_call.install({id(there): 0}, lambda *call: "routed")
    ours = nn.Module.__call__
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda module, *args: seen.append(module) or ours(module, *args))
        module_call.install({id(there): 0}, lambda *call: "routed again")
        assert (here(1), there(1)) == (1, "routed again")
        module_call.remove()
        assert (here(2), there(2)) == (2, 2)
        module_call.install({id(there): 0}, lambda *call: "routed")
        assert (here(3), there(3)) == (3, "routed")
    assert seen == [here, there] * 3


def test_the_owner_runs_hooks_but_not_what_the_class_adds_around_calls():
    class Counting(nn.Identity):
        calls = 0

        def __call__(self, *args):
            Counting.calls += 1
            return super().__call__(*args)

    module = Counting()
    module.register_forward_hook(lambda module, args, output: output + 1)
    module_call.install({}, lambda *call: None)
    assert module_call.call_here(module, (1,), {}) == 2
    assert Counting.calls == 0
