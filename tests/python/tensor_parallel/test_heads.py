# SPDX-License-Identifier: Apache-2.0
"""The heads that ranks of a team have, of queries and of keys."""

import pytest
from torch import nn

from lamina.errors import UsageError
from lamina.tensor_parallel.heads import Heads, heads_of


def heads(count, keys, degree):
    module = nn.Module()
    module.num_heads, module.num_key_value_heads, module.num_key_value_groups, module.head_dim = count, keys, 9, 4
    return [heads_of(module, [4 * count, 4 * keys], [4 * count], degree, index, "degree") for index in range(degree)]


@pytest.mark.parametrize(
    ("count", "keys", "degree", "own", "own_keys"),
    [
        (8, 8, 2, [4, 4], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 2, 2, [4, 4], [[0], [1]]),
        (6, 3, 2, [4, 2], [[0, 1], [2]]),  # no group is torn
        (5, 5, 3, [2, 2, 1], [[0, 1], [2, 3], [4]]),
        (8, 2, 4, [2, 2, 2, 2], [[0], [0], [1], [1]]),  # neighbours have the same
        (12, 3, 4, [3, 3, 3, 3], [[0], [0, 1, 1], [1, 1, 2], [2]]),  # one for each head
    ],
)
def test_ranks_have_heads_with_their_keys(count, keys, degree, own, own_keys):
    found = heads(count, keys, degree)
    assert [each.own.own for each in found] == own
    if keys < degree:
        assert [each.own_keys() for each in found] == own_keys
        assert all(each.are_shared_keys(4 * keys) and not each.are_shared_keys(4 * count) for each in found)
    for each, keys_here in zip(found, own_keys, strict=True):
        assert each.attributes() == {
            "num_heads": each.own.own,
            "num_key_value_heads": len(keys_here),
            "num_key_value_groups": each.own.own // len(keys_here),
        }


def test_a_rank_without_heads_is_an_error():
    with pytest.raises(UsageError, match="with degree some rank would have none"):
        heads(6, 6, 4)
    with pytest.raises(UsageError, match="which does not divide that"):
        heads(6, 4, 2)


def test_modules_without_numbers_say_the_features_of_a_head():
    module = nn.Module()
    assert heads_of(module, [8], [8], 2, 0, "") is None
    module.head_size = 4
    found = heads_of(module, [72], [24], 2, 0, "")
    assert (found.count, found.keys, found.unit_of("fused", 72)) == (6, 6, 12)
    assert isinstance(found, Heads) and not found.attributes()
