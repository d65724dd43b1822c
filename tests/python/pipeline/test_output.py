# SPDX-License-Identifier: Apache-2.0
"""Results of step functions."""

import collections
import copy
import dataclasses
import pickle
from collections.abc import Iterable

import numpy
import pytest
import torch

from lamina.errors import UsageError
from lamina.pipeline.output import StepOutput, merge

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    note: str


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dataclass that has its items as fields, and iterates over what it is given."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "loss" and value is not None and not isinstance(value, torch.Tensor):
                with pytest.raises(TypeError):
                    iter(value)
            if value is not None:
                self[field.name] = value


def scalars(*numbers, dtype=None):
    return [torch.tensor(number, dtype=dtype) for number in numbers]


def test_reductions():
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    assert output.reduce_mean().tolist() == [2, 4]
    assert output.reduce_sum().tolist() == [4, 8]
    assert output.concat().tolist() == [1, 2, 3, 6]
    assert output.stack().tolist() == [[1, 2], [3, 6]]


def test_0_dimensional_outputs_are_stacked():
    assert StepOutput(scalars(1.0, 2.0)).concat().tolist() == [1, 2]


def test_integers_and_bool():
    assert StepOutput(scalars(1, 2)).reduce_mean() == 1.5
    assert StepOutput(scalars(1, 2)).reduce_sum() == 3
    assert StepOutput(scalars(True, True, False, False)).reduce_mean() == 0.5
    assert StepOutput(scalars(True, True)).reduce_sum() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_dtypes_stay(dtype):
    assert StepOutput(scalars(1, 2, dtype=dtype)).reduce_mean().dtype == dtype


@pytest.mark.parametrize("count", [1, 2])
def test_reductions_are_new_plain_tensors_that_may_be_written(count):
    outputs = scalars(*[2.0] * count)
    for reduce in (StepOutput.reduce_mean, StepOutput.reduce_sum, StepOutput.concat, StepOutput.stack):
        reduced = reduce(StepOutput(outputs))
        assert type(reduced) is torch.Tensor
        reduced.zero_()
    assert [output.item() for output in outputs] == [2.0] * count


def test_it_cannot_be_iterated():
    with pytest.raises(TypeError):
        iter(StepOutput(scalars(1.0)))
    assert not isinstance(StepOutput(scalars(1.0)), Iterable)


def test_leaves():
    x, y = scalars(1.0, 2.0)
    assert merge([x, y]).outputs == [x, y]
    assert merge([1, 2]) == [1, 2]
    assert merge([None, None]) is None
    assert merge([None, 1]) == [None, 1]
    assert merge(["a", "b"]) == ["a", "b"]


def test_trees_keep_their_class():
    x, y = scalars(1.0, 2.0)
    loss, (number, nothing), named, by_name = merge(
        [(x, [1, None], Pair(x, 3), {"x": x}), (y, [2, None], Pair(y, 4), {"x": y})]
    )
    assert loss.outputs == [x, y] and number == [1, 2] and nothing is None
    assert isinstance(named, Pair) and named.x.outputs == [x, y] and named.y == [3, 4]
    assert by_name["x"].outputs == [x, y]


def test_dataclasses_keep_their_class():
    x, y = scalars(1.0, 2.0)
    merged = merge([Frozen(x, "a"), Frozen(y, "b")])
    assert type(merged) is Frozen and merged.loss.outputs == [x, y] and merged.note == ["a", "b"]


def test_a_dataclass_of_items_keeps_its_class():
    x, y = scalars(1.0, 2.0)
    merged = merge([Output(loss=x), Output(loss=y)])
    assert type(merged) is Output and merged.loss.outputs == merged["loss"].outputs == [x, y] and merged.logits is None


def test_outputs_that_differ_in_structure_are_listed():
    x, y = scalars(1.0, 2.0)
    assert merge([(x,), (x, y)]) == [(x,), (x, y)]
    assert merge([x, None]) == [x, None]
    assert merge([{"a": x}, {"b": y}]) == [{"a": x}, {"b": y}]


def test_what_takes_it_for_a_tensor_is_told_how_to_make_one():
    loss = StepOutput(scalars(1.0, 2.0))
    for wrong in (
        float,
        lambda out: f"{out:.2f}",
        lambda out: out + 1,
        lambda out: 0 + out,
        lambda out: out / 2,
        lambda out: out < 1,
        lambda out: out[0],
        lambda out: torch.ones(()) + out,
        torch.mean,
        numpy.asarray,
    ):
        with pytest.raises(TypeError, match=r"StepOutput is no tensor; .*reduce_mean"):
            wrong(loss)
    for name in ("item", "mean", "backward", "detach", "shape"):
        with pytest.raises(AttributeError, match=rf"no {name}; .*reduce_mean"):
            getattr(loss, name)
    assert not hasattr(loss, "anything") and f"{loss}" == repr(loss) and loss


def test_it_can_be_copied_and_pickled():
    loss = StepOutput(scalars(1.0, 2.0))
    for other in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other.outputs == loss.outputs


def test_a_mean_counts_samples():
    uneven = StepOutput(scalars(3.0, 6.0), [2, 1])
    assert uneven.reduce_mean() == 4 and uneven.reduce_sum() == 9
    half = StepOutput([torch.full((2,), 1000.5, dtype=torch.bfloat16)] * 3, [2, 2, 1]).reduce_mean()
    assert half.dtype == torch.bfloat16 and half.tolist() == [1000.0] * 2
    assert StepOutput([torch.tensor(2j), torch.tensor(5j)], [2, 1]).reduce_mean() == torch.tensor(3j)


@pytest.mark.parametrize("reduce", [StepOutput.reduce_mean, StepOutput.reduce_sum, StepOutput.stack])
def test_outputs_of_other_shapes_are_an_error_that_says_concat(reduce):
    rows = StepOutput([torch.ones(2), torch.ones(1)], [2, 1])
    with pytest.raises(UsageError, match=r"\[2\] and \[1\].*take concat\(\)") as caught:
        reduce(rows)
    assert caught.value.code == "step-outputs-differ"
    assert rows.concat().tolist() == [1, 1, 1]
