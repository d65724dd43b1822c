# SPDX-License-Identifier: Apache-2.0
"""How arguments are split into microbatches."""

import collections

import pytest
import torch

from lamina.errors import UsageError
from lamina.split import split

Pair = collections.namedtuple("Pair", "x y")


def test_a_tensor_becomes_equal_pieces_in_order():
    pieces = split(torch.arange(8).view(4, 2), 2, 0, "x")
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis):
    pieces = split(torch.arange(8).view(2, 4), 4, axis, "x")
    assert [piece.tolist() for piece in pieces] == [[[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]]]


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4)])
def test_empty_tensors_split(shape):
    pieces = split(torch.empty(shape), 2, 0, "x")
    assert torch.equal(torch.cat(pieces), torch.empty(shape)) and len(pieces) == 2


def test_a_0_dimensional_tensor_goes_to_all():
    scalar = torch.tensor(3.0)
    assert all(piece is scalar for piece in split(scalar, 3, 0, "x"))


def test_an_uneven_batch_names_argument_size_and_microbatches():
    with pytest.raises(UsageError, match=r"argument batch\['x'\]\[1\] of.*size 6 along axis 0.*multiple of 4"):
        split({"x": [1, torch.zeros(6, 2)]}, 4, 0, "batch")


def test_a_missing_axis_is_named():
    with pytest.raises(UsageError, match=r"x of shape \(4,\) has no axis 1"):
        split(torch.zeros(4), 2, 1, "x")


def test_containers_are_searched_and_keep_their_class():
    x = torch.arange(4)
    given = collections.OrderedDict(a=[x, "word"], b=(x, {"c": x}), d=Pair(x, 1), e={x})
    first, second = split(given, 2, 0, "x")
    assert type(second) is collections.OrderedDict
    assert second["a"][0].tolist() == [2, 3] and second["a"][1] == "word"
    assert second["b"][0].tolist() == second["b"][1]["c"].tolist() == [2, 3]
    assert isinstance(first["d"], Pair) and first["d"].x.tolist() == [0, 1] and first["d"].y == 1
    assert [piece.tolist() for piece in first["e"]] == [[0, 1]]


def test_what_holds_no_tensor_stays_the_same_object():
    for whole in (object(), [1, 2], {"a": (None, "b")}, torch.Size([1, 2]), torch.nn.Linear(1, 1), range(3)):
        assert all(piece is whole for piece in split(whole, 2, 0, "x"))


def test_an_object_may_slice_itself():
    class Sliced:
        def smp_slice(self, num_mb, mb, axis):
            return num_mb, mb, axis

    assert split([Sliced()], 2, 1, "x") == [[(2, 0, 1)], [(2, 1, 1)]]
