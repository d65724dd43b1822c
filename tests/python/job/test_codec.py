# SPDX-License-Identifier: Apache-2.0
"""Objects that travel as pickles beside tensors, and the encoding of all others."""

import collections
import dataclasses
import math

import pytest
import torch

import lamina
from lamina import _lamina
from lamina.job import codec

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    tensor: torch.Tensor
    again: torch.Tensor
    word: str = "w"


def test_tensors_stay_the_very_objects_each_once():
    weight = torch.nn.Parameter(torch.ones(2))
    product = weight * 2
    data, tensors = codec.pack(Batch(product, product, weight))
    assert len(tensors) == 2 and tensors[0] is product and tensors[1] is weight
    back = codec.unpack(data, tensors)
    assert back.tensor is back.again is product and back.word is weight


def test_no_value_of_a_tensor_is_in_the_pickle():
    data, _ = codec.pack(Batch(torch.ones(10_000), torch.ones(10_000)))
    assert len(data) < 1000


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(lamina.UsageError, match=r"builtins\.function cannot be sent to another rank"):
        codec.pack(lambda: None)
    with pytest.raises(lamina.UsageError, match=r"dict cannot be sent to another rank: .*'generator'"):
        codec.pack({"key": (i for i in ())})


def test_a_tensor_of_another_class_is_named():
    class Special(torch.Tensor):
        pass

    with pytest.raises(lamina.UsageError, match="Special"):
        codec.pack(torch.ones(2).as_subclass(Special))


def test_modules_of_the_model_become_the_receivers_own(start):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model = lamina.DistributedModel(module)
    back = codec.unpack(*codec.pack([module[0], module, model]))
    assert back[0] is module[0] and back[1] is module and back[2] is model


def test_other_modules(start):
    lamina.DistributedModel(torch.nn.Linear(2, 2))
    assert isinstance(codec.unpack(*codec.pack(torch.nn.ReLU())), torch.nn.ReLU)
    with pytest.raises(lamina.UsageError, match="Linear with parameters, which is no part"):
        codec.pack(torch.nn.Linear(2, 2))


VALUES = [
    None, True, 3, -(2**63), 2**70, 2.5, math.inf, "wörd", "\ud800", b"bytes", 1j, torch.float16, torch.device("cpu"),
    slice(1, None, 2), ..., [1, [2]], (1, ()), {"a": 1, 2: {"b": None}}, {1, 2}, frozenset("a"), Pair(1, [2]),
    range(3), collections.OrderedDict(a=1), torch.Size([2, 3]), lamina.WORLD,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_equal_and_of_the_same_class(value):
    back = _lamina.encode_roundtrip(value)
    assert back == value and type(back) is type(value)


def test_tensors_come_back_wherever_they_stand():
    x = torch.randn(2, 3)
    back = _lamina.encode_roundtrip({"a": [x, (x, None)], "b": Batch(x, x), "c": Pair(x, 1)})
    for tensor in (back["a"][0], back["a"][1][0], back["b"].tensor, back["c"].x):
        assert torch.equal(tensor, x)


def test_a_list_that_contains_itself_is_an_error():
    value = []
    value.append(value)
    with pytest.raises(lamina.UsageError, match="nested"):
        _lamina.encode_roundtrip(value)
