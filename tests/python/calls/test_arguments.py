# SPDX-License-Identifier: Apache-2.0
"""Changes of arguments that are copies of the caller's."""

import collections
import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

import lamina
from lamina.calls.arguments import ArgumentCheck


class Calls(nn.Module):
    """Does with its arguments what it is told to."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, hidden, state=None, *rest, **options):
        self.change(state)


def changed_by(change, *args, training=True, **kwargs):
    module = Calls(change).train(training)
    check = ArgumentCheck(module, "transformer.h.3", args, kwargs)
    module(*args, **kwargs)
    return check.changed()


def run(change, *args, training=True, **kwargs):
    assert changed_by(change, *args, training=training, **kwargs) == {}


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    notes: dict = dataclasses.field(default_factory=dict)


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = [1]


Pair = collections.namedtuple("Pair", "first second")
TENSOR = torch.ones(2)

CHANGES = {
    "append": (lambda: [1, 2], lambda state: state.append(3)),
    "item": (lambda: {"a": 1}, lambda state: state.update(a=2)),
    "new item": (lambda: {"a": 1}, lambda state: state.update(b=2)),
    "set": (lambda: {1}, lambda state: state.add(2)),
    "list in a tuple": (lambda: (1, [2]), lambda state: state[1].clear()),
    "list in a named tuple": (lambda: Pair(1, [2]), lambda state: state.second.clear()),
    "attribute": (lambda: State(TENSOR), lambda state: setattr(state, "notes", None)),
    "inside an attribute": (lambda: State(TENSOR), lambda state: state.notes.update(a=1)),
    "tensor of an object": (lambda: State(TENSOR), lambda state: setattr(state, "hidden", TENSOR.clone())),
    "tensor of a list": (lambda: [TENSOR], lambda state: state.__setitem__(0, TENSOR * 2)),
    "slot": (Slots, lambda state: state.value.append(2)),
    "subclass": (lambda: collections.OrderedDict(a=1), lambda state: state.move_to_end("b", state.update(b=1))),
    "array": (lambda: TENSOR.numpy().copy(), lambda state: state.__setitem__(0, 5)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make, change", CHANGES.values(), ids=CHANGES)
def test_an_argument_that_changed_is_found(make, change, training):
    state = make()
    assert changed_by(change, TENSOR, state, training=training)[1] is state
    assert changed_by(change, TENSOR, state=(again := make()), training=training)["state"] is again


def test_a_change_that_cannot_be_sent_is_an_error_that_names_module_argument_and_remedy():
    message = r"^transformer\.h\.3 changed its argument 'state' .* copies; place both on one partition"
    with pytest.raises(lamina.UsageError, match=message):
        run(lambda state: state.append(lambda: None), TENSOR, [1])


@pytest.mark.parametrize("make, change", CHANGES.values(), ids=CHANGES)
def test_what_is_only_read_may_be_anything(make, change):
    run(repr, TENSOR, make(), make(), extra=make())


def test_arguments_without_a_name_are_named_by_their_position():
    given = [1]
    with pytest.raises(lamina.UsageError, match="its positional argument 3"):
        run(lambda _: given.append(lambda: None), TENSOR, None, 0, given)
    given = [1]
    with pytest.raises(lamina.UsageError, match="its argument 'extra'"):
        run(lambda _: given.append(lambda: None), TENSOR, extra=given)


def test_values_written_into_tensors_are_nobodys_business_here():
    run(lambda state: state[0].add_(1), TENSOR, [TENSOR.clone()])


def test_what_cannot_change_is_not_looked_into(monkeypatch):
    monkeypatch.setattr("lamina.calls.arguments._Snapshot", None)
    module = nn.Linear(2, 2)
    values = (TENSOR, nn.Parameter(TENSOR), None, True, 1, 2.0, "text", b"bytes", torch.float16, torch.device("cpu"))
    run(repr, TENSOR, (values, Pair(1, (2,)), slice(1, 2), TENSOR.shape, module), extra=values)


def test_a_module_among_the_arguments_may_do_what_it_likes():
    def change(state):
        state[0].eval()

    run(change, TENSOR, [nn.Linear(2, 2)])


def test_an_object_that_cannot_be_compared_is_let_through():
    run(lambda state: state.append(1), TENSOR, [lambda: None])


@pytest.fixture(params=[object, nn.Module])
def cache(request, monkeypatch):
    """A cache as Hugging Face's transformers have it."""
    package, module = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")
    module.Cache = type("Cache", (request.param,), {"__module__": module.__name__})
    module.DynamicCache = type("DynamicCache", (module.Cache,), {"__module__": module.__name__})
    package.cache_utils = module
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", module)
    made = module.DynamicCache()
    made.layers = []
    return made


@pytest.mark.parametrize("wrap", [lambda cache: cache, lambda cache: {"past": (cache,)}, lambda cache: State(cache)])
def test_what_is_put_into_a_cache_in_training_is_dropped(cache, wrap):
    run(lambda _: cache.layers.append(TENSOR), TENSOR, wrap(cache))


def test_beside_a_cache_changes_are_found_in_training_too(cache):
    assert list(changed_by(lambda state: state.update(a=1), TENSOR, {"past": cache})) == [1]


@pytest.mark.parametrize("wrap", [lambda cache: cache, lambda cache: [cache]])
def test_in_evaluation_a_filled_cache_has_changed(cache, wrap):
    fill = lambda _: cache.layers.append(TENSOR)  # noqa: E731
    assert list(changed_by(fill, TENSOR, past=wrap(cache), training=False)) == ["past"]
    run(repr, TENSOR, wrap(cache), training=False)
