# SPDX-License-Identifier: Apache-2.0
"""How copies share out the microbatches of others."""

import itertools

import pytest
import torch

from lamina.trainer.data_spec import DataSpec
from lamina.trainer.deals import Cut


def of_all(cut, samples):
    """The sizes as each copy of the beginning cuts its own batch."""
    found = []
    for copy in range(cut.copies):
        own = torch.zeros(min(max(samples - copy * cut.rows, 0), cut.rows))
        found.append(DataSpec([own]).microbatches(own, cut.size, cut.pieces)[1] if len(own) else [])
    count = max(map(len, found))
    if cut.size is None:
        count = max(min(cut.pieces, samples, cut.rows), 1)
    return [each + [0] * (count - len(each)) for each in found]


def test_as_many_copies_have_the_microbatches_that_they_had():
    for pieces, rows in itertools.product(range(1, 7), range(1, 9)):
        cut = Cut(3, rows, None, pieces)
        assert cut.among(3, 3 * rows) == of_all(cut, 3 * rows)


@pytest.mark.parametrize("copies", [1, 2, 4, 5, 7, 9])
def test_others_share_out_the_same_ones(copies):
    for rows, (size, pieces) in itertools.product(range(1, 9), [(None, each) for each in range(1, 7)] + [(3, 1)]):
        cut = Cut(7, rows, size, pieces)
        full, alike = cut.among(copies, 7 * rows), 0
        for samples in range(1, 7 * rows + 1):
            found = cut.among(copies, samples)
            assert sum(map(sum, found)) == samples and len(found) == copies and len({*map(len, found)}) == 1
            assert all(sum(own) <= max(sum(most), 1) for own, most in zip(found, full, strict=True))
            theirs = list(itertools.chain(*of_all(cut, samples)))
            alike += list(itertools.chain(*found))[: len(theirs)] == theirs
        assert alike >= 7 * rows - (0 if size or copies == 1 else 2), (rows, pieces)


def test_a_batch_is_cut_into_microbatches_of_given_sizes():
    batch = {"x": torch.arange(6), "ids": list("abcdef")}
    spec = DataSpec([batch])
    found, counts = spec.microbatches(batch, None, 4, [2, 1, 3])
    assert counts == [2, 1, 3] and [each["ids"] for each in found] == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert spec.microbatches(batch, None, 3, [1, 1])[1] == [2, 2, 2], "of another batch"


def test_a_function_of_the_scripts_cuts_where_sizes_allow_that():
    spec = DataSpec([torch.arange(5)], split_batch=lambda batch, size: list(batch.split(size)))
    assert spec.microbatches(torch.arange(5), None, 2, [2, 2, 1])[1] == [2, 2, 1]
    assert spec.microbatches(torch.arange(5), None, 2, [1, 2, 2])[1] == [3, 2]
