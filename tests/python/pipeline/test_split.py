# SPDX-License-Identifier: Apache-2.0
"""How arguments are split into microbatches."""

import collections
import dataclasses
import itertools
import types

import numpy
import pytest
import torch
from torch.utils import _pytree

from lamina import _lamina
from lamina.errors import UsageError
from lamina.pipeline.split import Splitter

Pair = collections.namedtuple("Pair", "x y")


def cut(count, known=None, axes=None, **given):
    """The parts of each argument, and what has cut them. What has an axis is said to be split along it."""
    splitter, axes = Splitter(count, known=known), axes or {}
    for name, value in given.items():
        splitter.look(name, value, axes.get(name, 0), name in axes)
    return dict(zip(given, splitter.split(), strict=True)), splitter.engine


def split(value, count, axis, name):
    splitter = Splitter(count)
    splitter.look(name, value, axis)
    (pieces,) = splitter.split()
    return pieces


def test_a_tensor_becomes_pieces_in_order():
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


@pytest.mark.parametrize("make", [torch.arange, numpy.arange])
def test_pieces_of_an_uneven_batch_differ_by_one(make):
    assert [piece.tolist() for piece in split(make(7), 3, 0, "x")] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [piece.tolist() for piece in split(make(2), 3, 0, "x")] == [[0], [1]]


def test_tensors_of_several_rows_for_each_sample_are_cut_beside_the_others():
    pieces, engine = cut(2, x=torch.arange(3), y=torch.arange(6))
    assert engine.samples == [2, 1]
    assert [piece.tolist() for piece in pieces["y"]] == [[0, 1, 2, 3], [4, 5]]


def test_a_tensor_that_does_not_fit_beside_the_others_is_named():
    with pytest.raises(
        UsageError, match=r"argument w\[1\] of shape \(10,\) cannot.*argument x of shape \(12, 2\)"
    ) as caught:
        cut(4, x=torch.zeros(12, 2), w=[1, torch.zeros(10)])
    assert caught.value.code == "step-uneven"
    assert cut(1, x=torch.zeros(12, 2), w=torch.zeros(10))[1].samples == [12]


class Fresh(collections.abc.Mapping):
    def __getitem__(self, key):
        return torch.arange(4)

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2

    def __init__(self, items=()):
        self.items_ = items


def test_a_mapping_that_makes_its_tensors_anew_is_split():
    assert [piece.items_["b"].tolist() for piece in split(Fresh(), 2, 0, "x")] == [[0, 1], [2, 3]]


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


class Encoding(collections.UserDict):
    """As transformers.BatchEncoding is: with an attribute besides its items."""

    def __init__(self, data, note=None):
        super().__init__(data)
        self.note = note


class Frozen(collections.abc.Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Shared(collections.abc.MutableMapping, Frozen):
    """Copies of it share their items."""

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    x: torch.Tensor
    note: str = ""


class Registered:
    def __init__(self, x, note):
        self.x, self.note = x, note


_pytree.register_pytree_node(Registered, lambda one: ([one.x], one.note), lambda parts, note: Registered(*parts, note))

X = torch.arange(4)
BATCHES = {
    "user dictionary": (Encoding({"x": X}, "note"), lambda b: (b["x"], b.note)),
    "mapping": (Frozen({"x": X, "note": "note"}), lambda b: (b["x"], b["note"])),
    "mapping whose copies share their items": (Shared({"x": X, "note": "note"}), lambda b: (b["x"], b["note"])),
    "proxy": (types.MappingProxyType({"x": X, "note": "note"}), lambda b: (b["x"], b["note"])),
    "dataclass": (Batch(X, "note"), lambda b: (b.x, b.note)),
    "frozen dataclass": (FrozenBatch(X, "note"), lambda b: (b.x, b.note)),
    "namespace": (types.SimpleNamespace(x=X, note="note"), lambda b: (b.x, b.note)),
    "deque": (collections.deque([X, "note"]), tuple),
    "registered": (Registered(X, "note"), lambda b: (b.x, b.note)),
    "array in a dictionary": ({"x": X.numpy(), "note": "note"}, lambda b: (b["x"], b["note"])),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_every_kind_is_split_and_keeps_its_class(kind):
    batch, parts = BATCHES[kind]
    pieces = split(batch, 2, 0, "batch")
    assert [(type(piece), parts(piece)[0].tolist(), parts(piece)[1]) for piece in pieces] == [
        (type(batch), [0, 1], "note"),
        (type(batch), [2, 3], "note"),
    ]
    assert parts(batch)[0].tolist() == [0, 1, 2, 3]


def test_a_batch_in_itself_is_left_alone():
    batch = {"x": X}
    batch["self"] = batch
    assert [piece["x"].tolist() for piece in split(batch, 2, 0, "batch")] == [[0, 1], [2, 3]]
    assert all(piece["self"] is batch for piece in split(batch, 2, 0, "batch"))


def test_a_tensor_that_is_given_twice_is_the_same_twice():
    for first, second in split((X, {"again": X}), 2, 0, "batch"):
        assert first is second["again"]


def test_an_array_is_split_along_another_axis():
    pieces = split(numpy.arange(8).reshape(2, 4), 2, -1, "x")
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_sparse_tensor_is_split():
    dense = torch.eye(4)
    assert torch.equal(torch.cat([piece.to_dense() for piece in split(dense.to_sparse(), 2, 0, "x")]), dense)


def test_what_has_no_pieces_is_an_error_that_says_what_to_do():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)])
    for value, kind in ((packed, "PackedSequence"), (nested, "nested"), (torch.eye(4).to_sparse_csr(), "sparse_csr")):
        with pytest.raises(UsageError, match=rf"argument b\[0\] is .*{kind}.*non_split_inputs"):
            split([value], 2, 0, "b")


def test_an_iterator_over_batches_is_refused_that_the_first_microbatch_would_use_up():
    pairs = [(torch.ones(2), torch.ones(2))]
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    for value in ((pair for pair in pairs), zip(*pairs, strict=True), iter(pairs), iter(loader), enumerate(pairs)):
        with pytest.raises(UsageError, match=r"argument b is a .*: read a batch from it in the loop") as caught:
            split(value, 2, 0, "b")
        assert caught.value.code == "step-iterator"
        assert split(value, 1, 0, "b") == [value]
    counter = itertools.count()
    assert split(counter, 2, 0, "b") == [counter, counter]


OFFSETS = [
    ({"tokens": torch.zeros(12, 3), "cu_seqlens": torch.tensor([0, 3, 5, 12])}, "cu_seqlens"),
    ({"indices": torch.arange(10), "offsets": torch.tensor([0, 4])}, "offsets"),
    ({"x": torch.zeros(6), "bags": numpy.array([0, 1, 1, 4]), "y": torch.zeros(4)}, None),
    ({"x": torch.zeros(6), "bags": numpy.array([0, 1, 3, 6]), "y": torch.zeros(4)}, "bags"),
    ({"batch": {"x": torch.zeros(8), "more": [torch.tensor([0, 2, 4, 5])]}}, r"batch\['more'\]\[0\]"),
    ({"x": torch.zeros(4, 2), "y": torch.arange(4)}, None),  # one value for each row
    ({"x": torch.zeros(32, 2), "y": torch.arange(4)}, None),
    ({"x": torch.zeros(12, 2), "y": torch.tensor([0, 0, 1, 1])}, None),  # sorted classes
]


@pytest.mark.parametrize("given, refused", OFFSETS)
def test_offsets_are_refused_and_may_be_said_to_be_values_of_rows(given, refused):
    cut(2, axes=dict.fromkeys(given, 0), **given)
    if refused is None:
        cut(2, **given)
    else:
        with pytest.raises(UsageError, match=rf"argument {refused} .*looks like offsets.*non_split_inputs") as caught:
            cut(2, **given)
        assert caught.value.code == "step-offsets"


def test_a_summary_says_what_was_split_and_which_lists_of_the_batch_were_not():
    batch = {"x": torch.zeros(4, 3), "mask": torch.zeros(2, 2)}
    labels = (0, 1, 0, 1)
    _, engine = cut(2, batch=batch, labels=labels, sizes=[1, 2, 3])
    assert engine.remarks() == ["split"]
    assert engine.text("split").startswith(
        "split into 2 microbatches: batch['x'] (4, 3) along axis 0, batch['mask'] (2, 2) along axis 0; whole to each: "
        "labels (a list of 4). To keep an argument whole: "
    )


def test_lists_of_samples_are_cut_by_elements():
    pictures = [torch.full((3, 4 + number % 2, 4), number) for number in range(6)]
    names = tuple("abcdef")
    pieces, engine = cut(3, pictures=pictures, names=names, y=torch.arange(6), size=(4,) * 6)
    assert [[int(each[0, 0, 0]) for each in piece] for piece in pieces["pictures"]] == [[0, 1], [2, 3], [4, 5]]
    assert pieces["names"] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert pieces["size"] == [(4,) * 6] * 3
    summary = "pictures (6 samples) by elements, names (6 samples) by elements, y (6,) along axis 0"
    assert summary in engine.text("split")


def test_lists_of_tensors_with_the_rows_of_the_batch_are_cut_by_rows():
    pieces, _ = cut(2, pair=[torch.ones(4, 2), torch.ones(4)], y=torch.ones(4))
    assert [[len(each) for each in piece] for piece in pieces["pair"]] == [[2, 2], [2, 2]]


def test_a_list_that_may_be_either_is_named_and_what_is_said_of_it_decides():
    pictures = [torch.ones(3, 4, 4)] * 6
    for name, given in (("pictures", {"pictures": pictures}), (r"batch\['a'\]\[0\]", {"batch": {"a": [pictures]}})):
        with pytest.raises(UsageError, match=rf"how argument {name} is cut.*non_split_inputs") as caught:
            cut(3, **given)
        (argument,) = given
        assert caught.value.code == "step-list" and f'input_split_axes={{"{argument}": 0}}' in str(caught.value)
    pieces, _ = cut(3, axes={"pictures": 0}, pictures=pictures)
    assert [[each.shape[0] for each in piece] for piece in pieces["pictures"]] == [[1] * 6] * 3


def test_what_a_list_was_in_the_first_batch_holds_for_a_smaller_one():
    known = _lamina.KnownParts()
    for rows in (8, 3, 2):
        pieces, _ = cut(2, known, states=[torch.ones(rows, 5, 2)] * 3)
        assert [len(each) for each in pieces["states"][1]] == [rows // 2] * 3
    with pytest.raises(UsageError, match="how argument states is cut"):
        cut(2, states=[torch.ones(3, 5, 2)] * 3)
