# SPDX-License-Identifier: Apache-2.0
import dataclasses
import datetime
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers.modeling_outputs import CausalLMOutput as OfModel

from lamina.errors import ConfigError, UsageError
from lamina.trainer import Evaluator
from lamina.trainer.data_spec import DataSpec, PlainBatches, ensure_data_spec

Pair = namedtuple("Pair", "x y")
X = torch.arange(10).reshape(5, 2)


def count_samples(batch):
    return PlainBatches().count(batch)


def split(batch, size):
    return PlainBatches().split(batch, size)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, X[:, 0]),
        [X, [1, 2, 3, 4, 5]],
        {"x": X, "name": "same", "ids": list("abcde")},
        Pair(X, X[:, 0]),
        [{"x": X}, (X, 3.5)],
        list("abcde"),
    ],
    ids=["tensor", "tuple", "list", "dictionary", "named", "nested", "plain"],
)
def test_a_batch_is_cut_in_order_the_last_with_fewer(batch):
    assert count_samples(batch) == 5
    pieces = split(batch, 2)
    assert [count_samples(piece) for piece in pieces] == [2, 2, 1]
    assert all(type(piece) is type(batch) for piece in pieces)
    first = lambda tree: tree if isinstance(tree, torch.Tensor) else None  # noqa: E731
    tensors = [[first(part) for part in (piece.values() if isinstance(piece, dict) else piece)] for piece in pieces]
    if isinstance(batch, (tuple, list)) and isinstance(batch[0], torch.Tensor):
        assert torch.equal(torch.cat([each[0] for each in tensors]), X)


def test_plain_values_beside_tensors_are_of_every_sample():
    assert [piece["name"] for piece in split({"x": X, "name": "same"}, 2)] == ["same"] * 3
    assert [piece[1] for piece in split([X, 3], 4)] == [3, 3]


def test_a_tensor_without_axes_is_of_every_sample():
    found = split({"x": X, "scale": torch.tensor(3.0)}, 2)
    assert [len(each["x"]) for each in found] == [2, 2, 1] and all(each["scale"] == 3 for each in found)


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, lambda items: defaultdict(list, items)])
def test_microbatches_of_a_mapping_are_of_its_type(kind):
    batch = kind({"x": X})
    found = split(batch, 2)
    assert [len(each["x"]) for each in found] == [2, 2, 1] and all(type(each) is type(batch) for each in found)
    assert len(batch["x"]) == 5


def test_lists_of_samples_are_cut_by_elements():
    pictures = [torch.ones(3, 4 + number % 2, 4) for number in range(5)]
    boxes = [{"boxes": torch.ones(1 + number % 2, 4)} for number in range(5)]
    for batch in ((pictures, boxes), {"pictures": pictures, "targets": boxes}, (pictures, torch.arange(5)), boxes):
        spec = DataSpec([batch])
        pieces, counts = spec.microbatches(batch, 2, 1)
        assert counts == [2, 2, 1] and all(type(piece) is type(batch) for piece in pieces)
        first = (
            pieces[1] if batch is boxes else next(iter(pieces[1].values() if isinstance(batch, dict) else pieces[1]))
        )
        assert len(first) == 2 and first[0] is (boxes if batch is boxes else pictures)[2]
        (rest,) = spec.rest(batch, 3)
        assert spec.get_num_samples_in_batch(rest) == 2


def test_what_a_list_is_holds_for_the_batches_after_it():
    plain = PlainBatches()
    rows = lambda count: [torch.ones(count, 6, 2) for _ in range(3)]  # noqa: E731
    assert [plain.count(rows(count)) for count in (8, 3, 1)] == [8, 3, 1]
    with pytest.raises(UsageError, match=r"not clear how batch is cut.*split_batch.*\[step-list\]"):
        count_samples(rows(3))


def test_what_cannot_be_cut_or_counted_says_what_to_do():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for wrong in (
        lambda: split((X, object()), 1),
        lambda: split([X, X[:3]], 2),
        lambda: count_samples([X, X[:3]]),
        lambda: count_samples((nested, X[:2])),
    ):
        with pytest.raises(UsageError, match="DataSpec"):
            wrong()
    with pytest.raises(UsageError, match="no tensors"):
        count_samples({})


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: list


WORDS = [["a", "b"], ["c", "d"], ["e", "f"]]


@pytest.mark.parametrize(
    "batch, of_first",
    [
        ({"ids": [[1, 2], [3, 4], [5, 6]], "mask": [[1, 1], [1, 0], [0, 0]]}, lambda piece: piece["ids"]),
        (([[1, 2], [3, 4], [5, 6]], [0, 1, 0]), lambda piece: piece[0]),
        ([{"ids": 1}, {"ids": 2}, {"ids": 3}], lambda piece: piece),
        ([[1], [2, 3], [4]], lambda piece: piece),
        ([("a", "b", "c"), ("d", "e", "f")], lambda piece: piece[1]),
        (Pair(X[:3], WORDS), lambda piece: piece.y),
        (Pair(X[:3], WORDS), lambda piece: piece.x),
        ({"x": X[:3].numpy(), "when": datetime.date.today()}, lambda piece: piece["x"]),
        (OfModel(logits=X[:3]), lambda piece: piece["logits"]),
        ((torch.eye(3).to_sparse(), X[:3]), lambda piece: piece[0]),
    ],
)
def test_batches_of_plain_values_and_of_other_containers_are_cut(batch, of_first):
    pieces, counts = DataSpec([batch]).microbatches(batch, 2, 1)
    assert counts == [2, 1] and [of_first(piece).__len__() for piece in pieces] == [2, 1]
    assert all(type(piece) is type(batch) for piece in pieces)


def test_lists_of_lists_of_one_length_may_be_samples_or_parts():
    with pytest.raises(UsageError, match="not clear how batch is cut"):
        count_samples([[1, 2, 3], [4, 5, 6]])


def test_microbatches_are_of_a_size_or_so_many():
    spec = DataSpec([X])
    sizes = lambda size, pieces: [len(each) for each in spec.microbatches(X, size, pieces)[0]]  # noqa: E731
    assert sizes(2, 1) == [2, 2, 1]
    assert sizes(9, 1) == [5]
    assert sizes(None, 1) == [5]
    assert sizes(None, 2) == [3, 2]
    assert sizes(None, 3) == [2, 2, 1]
    assert sizes(None, 9) == [1] * 5


def test_the_samples_of_a_batch_and_of_its_microbatches_are_counted_once():
    counted = []
    spec = DataSpec([X], get_num_samples_in_batch=lambda batch: counted.append(len(batch)) or len(batch))
    assert spec.microbatches(X, 2, 1)[1] == [2, 2, 1] and counted == [5, 2, 2, 1]
    assert spec.microbatches(X, 9, 1)[1] == [5] and counted[4:] == [5]


def test_a_specification_is_of_a_loader_a_dictionary_or_itself():
    loader = DataLoader(TensorDataset(X), 2)
    spec = ensure_data_spec(loader)
    assert ensure_data_spec(spec) is spec and spec.num_samples == 5
    assert ensure_data_spec({"dataloader": loader, "num_samples": 3}).num_samples == 3
    assert DataSpec([X]).num_samples is None
    with pytest.raises(ConfigError, match="no batches"):
        DataSpec(3)
    persistent = DataLoader(TensorDataset(X), 2, num_workers=1, persistent_workers=True)
    next(iter(persistent))
    with pytest.raises(ConfigError, match="iterated over already"):
        DataSpec(persistent)


def test_names_of_metrics_are_any_sequence_of_them():
    """Configurations from files have lists of their own kind."""
    evaluator = Evaluator(label="a", dataloader=[], metric_names=UserList(["a.*", "b"]))
    assert list(evaluator.metrics_of({"ab": 1, "b": 2, "c": 3})) == ["ab", "b"]
