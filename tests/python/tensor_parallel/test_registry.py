# SPDX-License-Identifier: Apache-2.0
"""Classes that are registered to become others, and names of weights before and after."""

import re

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import UsageError
from lamina.tensor_parallel import correspondence, registry

ROWS = (
    lamina.nn.Row("h.*.c_attn.weight", ("seq.*.query.weight", "seq.*.key.weight"), True),
    lamina.nn.Row("h.*.ln.bias", "seq.*.norm.bias"),
)


class Other(lamina.nn.DistributedModule):
    pass


def made(name="Original"):
    class Original(nn.Module):
        def __init__(self, width, depth=2, *, bias=True):
            super().__init__()

        def forward(self, x, mask=None):
            return x

    return Original


def test_a_module_keeps_the_arguments_that_it_was_made_with():
    kind = made()
    before = kind(1)
    assert lamina.tp_register(Other)(kind) is kind
    registration = registry.registration_of(kind(3, bias=False))
    assert registration.kind is Other
    assert registry.arguments_of(kind(3, bias=False), registration) == ((3,), {"bias": False})
    with pytest.raises(registry.UnfitError, match="before its class was registered"):
        registry.arguments_of(before, registration)

    class Below(kind):
        pass

    assert registry.registration_of(Below(1)) is None
    lamina.tp_register_with_module(kind, Other, lambda width, depth=2, *, bias=True: ((), {}))
    assert registry.registration_of(before).init_hook is not None


@pytest.mark.parametrize(
    "hooks, text",
    [
        (
            {"init_hook": lambda width, depth=3, *, bias=True: 0},
            "init_hook of Original has the arguments (width, depth=3",
        ),
        (
            {"init_hook": lambda width, depth=2, bias=True: 0},
            "and Original.__init__ has (width, depth=2, *, bias=True)",
        ),
        ({"forward_hook": lambda x: 0}, "forward_hook of Original has the arguments (x), and Original.forward has"),
        ({"forward_hook": 3}, "forward_hook of Original has the arguments of no function"),
        ({"return_hook": "name"}, "return_hook of Original is no function: 'name'"),
    ],
)
def test_hooks_with_other_arguments_are_refused_when_they_are_registered(hooks, text):
    kind = made()
    with pytest.raises(UsageError, match=re.escape(text)) as error:
        lamina.tp_register_with_module(kind, Other, **hooks)
    assert error.value.code == "tp-register"
    assert registry.registration_of(kind(1)) is None


def test_other_things_than_classes_of_modules_are_refused():
    for kind, dist in [(made()(1), Other), (dict, Other), (made(), nn.Linear), (made(), Other())]:
        with pytest.raises(UsageError):
            lamina.tp_register_with_module(kind, dist)


def test_names_are_translated_there_and_back():
    state = {
        "model.h.10.c_attn.weight": torch.randn(3, 4),
        "model.h.1.ln.bias": torch.randn(3),
        "model.head": torch.randn(2),
        "h.1.ln.bias": torch.randn(1),
    }
    ours = correspondence.from_original(ROWS, state, "model.")
    weight = state["model.h.10.c_attn.weight"]
    assert torch.equal(ours["model.seq.10.query.weight"], weight[:, :2].t())
    assert torch.equal(ours["model.seq.10.key.weight"], weight[:, 2:].t())
    assert list(ours)[2:] == ["model.seq.1.norm.bias", "model.head", "h.1.ln.bias"]
    assert correspondence.from_original(ROWS, ours, "model.").keys() == ours.keys()
    theirs = correspondence.to_original(ROWS, ours, "model.")
    assert list(theirs) == list(state) and all(torch.equal(theirs[name], state[name]) for name in state)
    del ours["model.seq.10.key.weight"]
    assert "model.seq.10.query.weight" in correspondence.to_original(ROWS, ours, "model.")


def test_matrices_that_lie_side_by_side_head_by_head_are_taken_apart_and_put_together():
    row = lamina.nn.Row("qkv", ("q", "k"), transposed=True, heads=3)
    value = torch.arange(2.0 * 12).view(2, 12)  # of 3 heads with 2 features, of queries and of keys
    ours = correspondence.from_original((row,), {"qkv": value})
    assert ours["q"][:, 0].tolist() == [0, 1, 4, 5, 8, 9] and ours["k"][:, 1].tolist() == [14, 15, 18, 19, 22, 23]
    assert torch.equal(correspondence.to_original((row,), ours)["qkv"], value)
